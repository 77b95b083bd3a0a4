"""Merged weights equal the weights of a checkpoint with merged layers, in every layout, and are restored exactly."""

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from engine_builder.kernels.fp8_conv import can_quantize_conv, quantize_conv
from engine_builder.kernels.fp8_linear import quantize_linear
from engine_builder.networks.network import public_name
from engine_builder.networks.unet import StepUnet, UnetTextNetwork, UnetTimeNetwork
from model.adapters.changes import Change, difference
from model.adapters.layers import find_layers
from model.adapters.merge import AdaptableWeights
from model.weights.fp8 import quantize
from model.weights.layout import from_stored, to_stored
from tests.support.adapters import Delta

Tensors = dict[str, torch.Tensor]
NETWORKS = {"unet": StepUnet, "unet_text": UnetTextNetwork, "unet_time": UnetTimeNetwork}


def wide_unet() -> UNet2DConditionModel:
    """A small UNet with all kinds of layers; some of its convolutions are wide enough for Winograd's weights."""
    torch.manual_seed(1)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(320, 640),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        cross_attention_dim=32,
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    )


def server_tensors(unet: UNet2DConditionModel, gpu_layout: bool) -> dict[str, Tensors]:
    """Return the tensors of the three networks of a UNet by component, as a server has them after loading."""
    tensors = {}
    for component, kind in NETWORKS.items():
        options = {"use_winograd": True} if gpu_layout and component == "unet" else {}
        network = kind(copy.deepcopy(unet), **options)
        layout = "channels_last" if gpu_layout else "plain"
        named = {public_name(name): tensor.detach() for name, tensor in network.named_parameters()}
        tensors[component] = {n: from_stored(to_stored(t, layout).clone(), layout) for n, t in named.items()}
    return tensors


def deltas_of(unet: UNet2DConditionModel, rank: int, seed: int) -> dict[str, Delta]:
    """Return random factors for every linear and convolution."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 10

    deltas = {}
    for name, module in unet.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            out, *inner = module.weight.shape
            deltas[f"unet.{name}"] = (random(rank, *inner), random(out, rank), rank / 2)
    return deltas


def factors_of(deltas: Mapping[str, Delta]) -> dict[str, Change]:
    return {
        name: Change("matrix", {"down": down, "up": up}, alpha / len(down))
        for name, (down, up, alpha) in deltas.items()
    }


def with_deltas(unet: UNet2DConditionModel, adapters: Sequence[tuple[Mapping[str, Delta], float]]) -> Any:
    """Return a copy of the UNet with merged layers, computed in fp64."""
    merged = copy.deepcopy(unet)
    for deltas, scale in adapters:
        for name, (down, up, alpha) in deltas.items():
            weight = merged.get_submodule(name.removeprefix("unet.")).weight.data
            delta = scale * alpha / len(down) * (up.double() @ down.double().flatten(1)).view_as(weight)
            weight.copy_(weight.double() + delta)
    return merged


def adaptable(tensors: Mapping[str, Tensors]) -> AdaptableWeights:
    shapes = {name: {n: tuple(t.shape) for n, t in by_name.items()} for name, by_name in tensors.items()}
    return AdaptableWeights({name: [by_name] for name, by_name in tensors.items()}, find_layers(shapes).values())


# channels_last with Winograd's weights, or plain, which `test_merges_every_layer_of_a_unet` covers in `make test`
both_layouts = pytest.mark.parametrize("gpu_layout", [pytest.param(False, marks=pytest.mark.full), True])


@pytest.mark.parametrize("gpu_layout", [False, True])
def test_merges_every_layer_of_a_unet(gpu_layout: bool) -> None:
    unet = wide_unet()
    tensors = server_tensors(unet, gpu_layout)
    assert any(t.ndim == 3 for t in tensors["unet"].values()) == gpu_layout
    addresses = {name: t.data_ptr() for name, t in tensors["unet"].items()}
    one, two = deltas_of(unet, 4, seed=1), deltas_of(unet, 2, seed=2)
    weights = adaptable(tensors)
    weights.merge([(factors_of(one), 0.5), (factors_of(two), -1.5)])
    expected = server_tensors(with_deltas(unet, [(one, 0.5), (two, -1.5)]), gpu_layout)
    for component in NETWORKS:
        for name, tensor in tensors[component].items():
            torch.testing.assert_close(tensor, expected[component][name], rtol=1e-4, atol=1e-4, msg=name)
    assert {name: t.data_ptr() for name, t in tensors["unet"].items()} == addresses


def other_changes(unet: UNet2DConditionModel, seed: int) -> dict[str, Change]:
    """Return a random change of each parameter, of the forms that are no LoRA in turn."""
    generator, changes, counts = torch.Generator().manual_seed(seed), {}, Counter[int]()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 10

    for name, parameter in unet.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            changes[f"unet.{name}"] = Change("matrix", {"full": random(*shape)}, 0.5)
            continue
        magnitude = parameter.detach().flatten(1).norm(dim=1, keepdim=True) * (1 + random(shape[0], 1))
        low_rank = {"down": random(3, *shape[1:]), "up": random(shape[0], 3)}
        hadamard = {f"{index}.{role}": part for index in (1, 2) for role, part in low_rank.items()}
        sides = [2 if side % 2 == 0 else 1 for side in shape[:2]]
        inner = random(*(side // outer for side, outer in zip(shape[:2], sides, strict=True)), *shape[2:])
        forms = (
            ("matrix", {"full": random(*shape)}),
            ("matrix", low_rank | {"magnitude": magnitude}),
            ("matrix", low_rank | {"magnitude": 1 + random(1, shape[1])}),
            ("hadamard", hadamard),
            ("kronecker", {"1.full": random(*sides), "2.full": inner}),
            ("kronecker", {"1.full": random(*sides), "2.full": inner, "magnitude": magnitude}),
            ("gain", {"gain": random(shape[0], 1)}),
            ("gain", {"gain": random(1, shape[1])}),
        )
        form, parts = forms[counts[len(shape)] % len(forms)]
        counts[len(shape)] += 1
        changes[f"unet.{name.removesuffix('.weight')}"] = Change(form, parts, 0.7)
    return changes


@pytest.mark.parametrize("gpu_layout", [False, True])
def test_merges_other_forms_into_every_tensor(gpu_layout: bool) -> None:
    """The weights are those of a checkpoint to whose parameters the differences were added."""
    unet = wide_unet()
    tensors, merged = server_tensors(unet, gpu_layout), copy.deepcopy(unet)
    kinds = set()
    adapters = [(other_changes(unet, seed=seed), scale) for seed, scale in ((1, 0.5), (2, -1.0))]
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            layer = f"unet.{name if parameter.ndim == 1 else name.removesuffix('.weight')}"
            own = parameter.clone()
            for changes, scale in adapters:
                parameter += difference(changes[layer], scale, own).view(own.shape)
                kinds.add((changes[layer].form, len(changes[layer].parts), parameter.ndim))
    assert len(kinds) == 13
    weights = adaptable(tensors)
    weights.merge(adapters)
    expected = server_tensors(merged, gpu_layout)
    for component in NETWORKS:
        for name, tensor in tensors[component].items():
            torch.testing.assert_close(tensor, expected[component][name], rtol=1e-4, atol=1e-4, msg=name)
    before = server_tensors(unet, gpu_layout)
    weights.merge([])
    assert all(torch.equal(t, before[c][n]) for c, by_name in tensors.items() for n, t in by_name.items())


def test_rounds_half_precision_once() -> None:
    unet = wide_unet().half()
    tensors, deltas = server_tensors(unet, gpu_layout=False), deltas_of(unet.float(), 4, seed=1)
    unet = unet.half()
    adaptable(tensors).merge([(factors_of(deltas), 1.0)])
    exact = server_tensors(with_deltas(unet.double(), [(deltas, 1.0)]), gpu_layout=False)
    name = "mid_block.attentions.0.proj_in.weight"
    rounded = exact["unet"][name].half()
    differing = (tensors["unet"][name] != rounded).float().mean()
    assert tensors["unet"][name].dtype == torch.float16 and differing < 0.01  # ties and sums in fp32


@both_layouts
def test_restores_weights_exactly_after_100_swaps(gpu_layout: bool) -> None:
    unet = wide_unet().half()
    tensors = server_tensors(unet, gpu_layout)
    before = {component: {name: t.clone() for name, t in by_name.items()} for component, by_name in tensors.items()}
    adapters = [factors_of(deltas_of(unet.float(), 2, seed)) for seed in range(3)]
    some = re.compile(r"unet\.mid_block\..*(attn1|conv1)|unet\.down_blocks\.0\.resnets\.0\.conv1")
    chosen = [{name: f for name, f in adapter.items() if some.match(name)} for adapter in adapters]
    weights = adaptable(tensors)
    for swap in range(100):
        weights.merge([(chosen[swap % 3], 1.0), (chosen[(swap + 1) % 3], 0.5)][: swap % 2 + 1])
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_qkv.weight"
    assert not torch.equal(tensors["unet"][name], before["unet"][name])
    weights.merge([])
    for component, by_name in tensors.items():
        assert all(torch.equal(tensor, before[component][name]) for name, tensor in by_name.items())


def test_quantizes_merged_weights_with_the_same_scale() -> None:
    """Small changes remain, on average. They would be lost if they were added to rounded weights."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 256, bias=False).half()
    quantized = quantize_linear(linear, 1.0)
    name = "mid_block.attentions.0.proj_in.weight"
    tensors = {"unet": {name: quantized.weight.data, name + "_scale": quantized.weight_scale}}
    before = quantized.weight.data.clone()
    layers = find_layers({"unet": {name: (256, 256)}})
    weights = AdaptableWeights({"unet": [tensors["unet"]]}, layers.values(), {"unet": {name: linear.weight.data}})
    down, up = torch.randn(1, 256), torch.randn(256, 1) * 5e-4
    weights.merge([({"unet.mid_block.attentions.0.proj_in": Change("matrix", {"down": down, "up": up}, 1.0)}, 1.0)])
    change = (quantized.weight.data.float() - before.float()) * quantized.weight_scale
    slope = (change * (up @ down)).sum() / (up @ down).square().sum()
    assert 0.9 < slope < 1.1
    # DoRA changes the weights in 16 bits, not those that were rounded.
    parts = {"down": down, "up": up, "magnitude": torch.rand(256, 1) + 0.5}
    weights.merge([({"unet.mid_block.attentions.0.proj_in": Change("matrix", parts, 1.0)}, 1.0)])
    moved = linear.weight.data.float() + up @ down
    decomposed = moved * parts["magnitude"] / moved.norm(dim=1, keepdim=True)
    expected = quantize(decomposed, quantized.weight_scale).float()
    assert (quantized.weight.data.float() - expected).norm() / expected.norm() < 1e-3
    weights.merge([])
    assert torch.equal(quantized.weight.data.view(torch.uint8), before.view(torch.uint8))


@both_layouts
def test_merges_convolutions_in_8_bits(gpu_layout: bool) -> None:
    """The result equals quantized merged weights, by each output's scale. fp16 engines may have Winograd's weights."""
    unet = wide_unet()
    layout = "channels_last" if gpu_layout else "plain"
    originals = server_tensors(unet, gpu_layout)["unet"]
    module = StepUnet(copy.deepcopy(unet), use_winograd=gpu_layout)
    convolutions = {public_name(name): child for name, child in module.named_modules() if can_quantize_conv(child)}
    assert any(original.ndim == 3 for original in originals.values()) == gpu_layout
    assert any(name.endswith(".phases") for name in convolutions) and len(convolutions) > 8
    served: Tensors = {}
    for name, conv in convolutions.items():
        layer = quantize_conv(conv, 1.0)
        weight = from_stored(to_stored(layer.weight.data, layout).clone(), layout)
        served |= {f"{name}.weight": weight, f"{name}.weight_scale": layer.weight_scale}
    before = {name: tensor.clone() for name, tensor in served.items()}
    layers = find_layers({"unet": {name: tuple(tensor.shape) for name, tensor in served.items()}})
    weights = AdaptableWeights({"unet": [served]}, layers.values(), {"unet": originals})
    deltas = {name: delta for name, delta in deltas_of(unet, 2, seed=1).items() if name in layers}
    assert len(deltas) == len(convolutions)
    weights.merge([(factors_of(deltas), 0.1)])
    merged = StepUnet(with_deltas(unet, [(deltas, 0.1)]))
    exact = {public_name(name): tensor for name, tensor in merged.named_parameters()}
    for name in convolutions:
        scale = served[f"{name}.weight_scale"][:, None, None, None]
        expected = quantize(exact[f"{name}.weight"], scale).float()
        found = served[f"{name}.weight"].float()
        assert not torch.equal(found, before[f"{name}.weight"].float())
        assert (found - expected).norm() / expected.norm() < 5e-3, name
    weights.merge([])
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in served.items())
