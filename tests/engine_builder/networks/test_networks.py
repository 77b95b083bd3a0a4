"""Networks: checkpoints in all of their forms, wrappers against diffusers, fast forms against PyTorch, engine keys."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors import safe_open
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from engine_builder.backends.aot_inductor.compile import dynamic_bucket, engine_key, example_inputs, static_bucket
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, Size
from engine_builder.building.validate import validate
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, variant_of
from engine_builder.kernels import winograd
from engine_builder.kernels.kernel_form import has_half_kernels, has_kernels, plain_operations
from engine_builder.kernels.winograd import WinogradConv
from engine_builder.networks import blocks
from engine_builder.networks.blocks import channels_last_group_norm, subpixel_upsample, upsample
from engine_builder.networks.network import ModuleReader, load_network
from engine_builder.stores.store import open_writable_store
from model.loading.target import Target
from model.pipeline import spec
from model.store.precision import BF16, FP16, FP32, Precision
from model.weights.transforms import winograd_weight
from tests.engine_builder.helpers import edit_json, edit_weights, install_metadata
from tests.support.components import BASE_COMPONENTS, UNET_VARIANTS
from tests.support.repository import MODEL_FOLDER

CLASSES = {
    "text_encoder": (CLIPTextModel, "text_encoder"),
    "text_encoder_2": (CLIPTextModelWithProjection, "text_encoder_2"),
    "unet_text": (UNet2DConditionModel, "unet"),
    "unet_time": (UNet2DConditionModel, "unet"),
    "unet": (UNet2DConditionModel, "unet"),
    "vae_encoder": (AutoencoderKL, "vae"),
    "vae_decoder": (AutoencoderKL, "vae"),
}


def edit_config(subfolder: Path, **entries: object) -> None:
    edit_json(subfolder / "config.json", **entries)


FOLDERS = ("text_encoder", "text_encoder_2", "unet", "vae")


def components_in(subfolder: str) -> list[str]:
    return [component for component in BASE_COMPONENTS if CLASSES[component][1] == subfolder]


def tensors_of(folder: Path, component: str) -> dict[str, torch.Tensor]:
    return load_network(Checkpoint(folder), component, FP16).tensors()


@pytest.mark.parametrize("subfolder", FOLDERS)
def test_every_form_of_a_checkout_has_the_same_tensors(subfolder: str, folder_copy: Path) -> None:
    """In several files, in half precision, or both. Half precision has the same numbers, rounded."""
    folder, components = folder_copy / subfolder, components_in(subfolder)
    network: Any = CLASSES[components[0]][0].from_pretrained(folder).half()
    shutil.rmtree(folder)
    network.save_pretrained(folder)
    plain = {component: tensors_of(folder_copy, component) for component in components}
    for form in ({"max_shard_size": "3KB"}, {"variant": "fp16"}, {"variant": "fp16", "max_shard_size": "3KB"}):
        shutil.rmtree(folder)
        network.save_pretrained(folder, **form)
        files = [file.name for file in folder.glob("*.safetensors")]
        assert all(("fp16" in name) == ("variant" in form) for name in files)
        assert (len(files) > 1) == ("max_shard_size" in form)
        for component, expected in plain.items():
            read = tensors_of(folder_copy, component)
            # The text network has one product: see `UnetTextNetwork`.
            assert read.keys() == expected.keys() and len(read) >= (1 if component == "unet_text" else 8)
            for name, tensor in expected.items():
                assert tensor.dtype == torch.float16 or not tensor.is_floating_point()
                assert torch.equal(read[name], tensor), (form, name)


def test_reads_fp16_weights_if_plain_ones_are_incomplete(folder_copy: Path) -> None:
    """An interrupted download leaves a Hub cache so."""
    folder = folder_copy / "unet"
    plain = tensors_of(folder_copy, "unet")
    network: Any = UNet2DConditionModel.from_pretrained(folder)
    network.save_pretrained(folder, max_shard_size="3KB")
    [plain_file] = [file for file in folder.glob("*.safetensors") if "-of-" not in file.name]
    plain_file.unlink()
    network.half().save_pretrained(folder, variant="fp16")
    assert variant_of(Checkpoint(folder_copy), "unet") is None
    sorted(folder.glob("*-of-*.safetensors"))[-1].unlink()
    assert variant_of(Checkpoint(folder_copy), "unet") == "fp16"
    read = tensors_of(folder_copy, "unet")
    assert read.keys() == plain.keys() and all(torch.equal(read[name], plain[name]) for name in plain)


@pytest.mark.parametrize("subfolder", FOLDERS)
def test_tensors_have_the_checkpoints_names(subfolder: str, toy_folder: Path) -> None:
    """Each tensor of a UNet or VAE belongs to one of its components. Tensors in another form have other names."""
    [file] = (toy_folder / subfolder).glob("*.safetensors")
    with safe_open(file, "pt") as checkpoint:
        names = {name.removeprefix("text_model.") for name in checkpoint.keys()}
    read = [
        name.removeprefix("text_model.")
        for component in components_in(subfolder)
        for name in load_network(Checkpoint(toy_folder), component, FP32).tensors()
    ]
    assert len(set(read)) == len(read)
    # Positions are computed.
    assert {name for name in read if not name.endswith("position_ids")} == {stored_as(name) for name in names}


def stored_as(name: str) -> str:
    """Return the name of the tensor that contains a checkpoint's tensor."""
    if ".attn2.to_k." in name or ".attn2.to_v." in name:
        return "keys_values.0.weight"
    if ".time_emb_proj." in name:
        return f"biases.{name.rpartition('.')[2]}"
    return (
        re.sub(r"(attn1\.to_[qkv]|self_attn\.[qkv]_proj)\.", lambda found: f"{found[1].split('.')[0]}.to_qkv.", name)
        .replace(".ff.net.0.proj.", ".ff.net.0.interleaved.")
        .replace(".upsamplers.0.conv.", ".upsamplers.0.phases.")
    )


def test_reads_weights_once_for_all_components(folder_copy: Path) -> None:
    """The weights of each subfolder are deleted after the first of its components is loaded."""
    checkpoint = Checkpoint(folder_copy)
    alone = {name: load_network(checkpoint, name, FP32).tensors() for name in BASE_COMPONENTS}
    reader = ModuleReader()
    for name, expected in alone.items():
        actual = load_network(checkpoint, name, FP32, reader=reader).tensors()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())
        for file in (folder_copy / CLASSES[name][1]).glob("*.safetensors"):
            file.unlink()
    load_network(checkpoint, "vae_decoder", FP32, reader=reader)
    with pytest.raises(CheckpointError, match="vae has no .safetensors file"):
        load_network(checkpoint, "vae_decoder", BF16, reader=reader)


@pytest.mark.parametrize("refiner", [False, True])
def test_three_unet_networks_predict_as_diffusers(refiner: bool) -> None:
    folder = Checkpoint(MODEL_FOLDER / "refiner" if refiner else MODEL_FOLDER)
    names = ("refiner_unet_text", "refiner_unet_time", "refiner_unet") if refiner else BASE_COMPONENTS[2:5]
    text, time, unet = [load_network(folder, name, FP32) for name in names]
    whole = UNet2DConditionModel.from_pretrained(folder.root / "unet", torch_dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    sample, hidden = torch.randn(3, 4, 32, 24, generator=random), torch.randn(3, 77, 224, generator=random)
    hidden = hidden[..., : whole.config.cross_attention_dim]
    pooled, timestep = torch.randn(3, 128, generator=random), torch.tensor([951.0, 20.0, 381.0])
    time_ids = 256 * torch.rand(3, 5 if refiner else 6, generator=random)
    with torch.inference_mode():
        added = {"text_embeds": pooled, "time_ids": time_ids}
        expected = whole(sample, timestep, encoder_hidden_states=hidden, added_cond_kwargs=added, return_dict=False)[0]
        actual = unet.module(sample, *time.module(timestep, pooled, time_ids), *text.module(hidden))[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("component", "rank"), [("unet", 0), ("unet_lora", 4)])
def test_guided_unet_equals_unet_with_zero_text(component: str, rank: int) -> None:
    """The results are equal bit for bit. The guided UNet reads neither text nor latents of the unconditional half.

    With adapters each image has its own, and its unconditional half has the same.
    """
    folder = Checkpoint(MODEL_FOLDER)
    plain, guided = (load_network(folder, name, FP32, lora_rank=rank) for name in (component, f"{component}_guided"))
    assert guided.tensors().keys() == plain.tensors().keys() and guided.signature == plain.signature
    inputs = example_inputs(plain.signature, 4, 64, 96, "cpu")
    for name in {"sample", "lora_down", "lora_up"} & inputs.keys():
        inputs[name][2:] = inputs[name][:2]
    inputs["keys_values"][2:] = 0
    with torch.inference_mode():
        expected = plain.module(*inputs.values())[0]
        if rank:
            without = plain.module(*(inputs | {"lora_up": torch.zeros_like(inputs["lora_up"])}).values())[0]
            assert not torch.allclose(expected, without, atol=1e-3)
        inputs["sample"][2:] = inputs["keys_values"][2:] = float("nan")
        actual = guided.module(*inputs.values())[0]
        text = load_network(folder, "unet_text", FP32).module(torch.zeros(1, 77, 224))[0]
    assert torch.equal(actual, expected)
    assert not text.any()  # an encoding of zeros has zero keys and values


def test_gpu_build_has_a_variant_for_guided_images(toy_folder: Path, folder_copy: Path, target: Target) -> None:
    gpu = replace(target, device="cuda", product="h200", capability="sm90")
    sizes = (Size(1, 512, 512), Size(2, 512, 512), Size(5, 512, 512), Size(8, 512, 768))
    plan = BuildPlan("toy", Checkpoint(toy_folder), None, gpu, FP32, sizes)
    names = (spec.UNET, "unet_guided")
    at = plan.components.index(spec.UNET)
    assert plan.components[at : at + 3] == (*names, spec.VAE_ENCODER)  # a variant follows its component
    networks = [load_network(Checkpoint(toy_folder), name, FP32, "meta") for name in names]
    bucket = static_bucket(2, 512, 512)
    assert plan.buckets_of(networks[1]) == [bucket, static_bucket(8, 512, 768)]  # of every even batch
    assert len({engine_key(one, gpu, bucket) for one in networks}) == 2

    with_adapters = replace(plan, lora_rank=4).components
    assert with_adapters[-2:] == ("unet_lora", "unet_lora_guided")
    assert "unet_lora_guided" not in replace(plan, lora_rank=4, target=target).components

    edit_json(folder_copy / "model_index.json", force_zeros_for_empty_prompt=False)
    for other in (
        replace(plan, target=target),  # its loop cannot use it
        replace(plan, sizes=(Size(1, 512, 512), Size(5, 512, 512))),
        replace(plan, tensorrt=PlanOptions()),
        replace(plan, tensorrt=PlanOptions(runtime="tensorrt-rtx", refit="none")),
        replace(plan, base=Checkpoint(folder_copy)),  # its unconditional text is the encoding of an empty prompt
    ):
        assert not {*UNET_VARIANTS} & {*other.components}


@pytest.mark.parametrize(("small", "large"), [(0, 2**40), (0, 0), (2**40, 2**40)])
def test_channels_last_group_norm_equals_pytorch(small: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for GPUs, on the CPU. Its statistics are exact even if the mean is far from zero."""
    monkeypatch.setattr(blocks, "_SMALL_ELEMENTS", small)
    monkeypatch.setattr(blocks, "_LARGE_ELEMENTS", large)
    norm = torch.nn.GroupNorm(8, 64)
    # This seed's weights are at most 2.4. With 3.4, as of other seeds, fp32 rounding exceeds the bounds below.
    generator = torch.Generator().manual_seed(3)
    torch.nn.init.normal_(norm.weight, generator=generator)
    torch.nn.init.normal_(norm.bias, generator=generator)
    for height, width in ((8, 8), (26, 38), (13, 19), (128, 128)):
        noise = torch.randn(2, 64, height, width, generator=torch.Generator().manual_seed(0))
        hidden = 3 * noise + 50
        torch.testing.assert_close(channels_last_group_norm(norm, hidden), norm(hidden), rtol=1e-4, atol=1e-4)
        hidden = noise + 100  # sums of squares would be wrong by 1e-3
        exact = F.group_norm(hidden.double(), 8, norm.weight.double(), norm.bias.double(), norm.eps).float()
        torch.testing.assert_close(channels_last_group_norm(norm, hidden), exact, rtol=0, atol=2e-4)


def upsample_in_phases(conv: torch.nn.Conv2d, hidden: torch.Tensor) -> torch.Tensor:
    upsampler = SimpleNamespace(conv=conv)
    subpixel_upsample(upsampler)
    upsampler.phases.to(memory_format=torch.channels_last)
    return upsample(upsampler, hidden)


def upsample_then_convolve(conv: torch.nn.Conv2d, hidden: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = conv(torch.nn.functional.interpolate(hidden, scale_factor=2.0, mode="nearest"))
    return out


@torch.inference_mode()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_subpixel_upsample_equals_upsample_and_convolve(layout: torch.memory_format) -> None:
    conv: Any = torch.nn.Conv2d(6, 10, 3, padding=1, dtype=torch.float64)
    conv = conv.to(memory_format=layout)
    for batch, height, width in ((1, 8, 8), (3, 7, 5), (2, 1, 6), (2, 16, 9)):
        hidden = torch.randn(batch, 6, height, width, dtype=torch.float64).to(memory_format=layout)
        actual = upsample_in_phases(conv, hidden)
        assert actual.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(actual, upsample_then_convolve(conv, hidden), rtol=1e-12, atol=1e-12)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_subpixel_upsample_rounds_as_little_as_convolution(dtype: torch.dtype) -> None:
    conv = torch.nn.Conv2d(64, 64, 3, padding=1, dtype=torch.float64).to(dtype)
    hidden = torch.randn(2, 64, 12, 12).to(dtype)
    # On a CPU the result is rounded before the bias is added. That error is not the weights'.
    torch.nn.init.zeros_(conv.bias)
    exact = upsample_then_convolve(copy.deepcopy(conv).double(), hidden.double())

    def error(out: torch.Tensor) -> float:
        return float((out.double() - exact).norm() / exact.norm())

    plain, phases = error(upsample_then_convolve(conv, hidden)), error(upsample_in_phases(conv, hidden))
    assert 0 < phases < 1.5 * plain


@torch.inference_mode()
def test_winograd_weights_match_the_literature() -> None:
    """A^T [(weights) (B^T tile B)] A is the convolution of a tile, with the matrices of Lavin and Gray."""
    conv = torch.nn.Conv2d(5, 7, 3, bias=False, dtype=torch.float64)
    tile = torch.randn(5, 4, 4, dtype=torch.float64)
    into = torch.tensor([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=torch.float64)
    out = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, -1]], dtype=torch.float64)
    places = (into @ tile @ into.T).flatten(1)  # [in, 16]
    weights = winograd_weight(conv.weight)
    assert weights.shape == (16, 7, 5) and weights.is_contiguous()
    products = torch.einsum("pnc,cp->np", weights, places).unflatten(1, (4, 4))
    torch.testing.assert_close(out @ products @ out.T, conv(tile[None])[0], rtol=1e-12, atol=1e-12)


@torch.inference_mode()
def test_winograd_conv_call_equals_pytorch() -> None:
    """Its weights are rounded once."""
    conv = torch.nn.Conv2d(48, 40, 3, padding=1, dtype=torch.float64)
    hidden = torch.randn(2, 48, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(WinogradConv(conv)(hidden), conv(hidden), rtol=1e-12, atol=1e-12)
    halves = WinogradConv(conv.half())(hidden.half()).double()
    assert (halves - conv.double()(hidden)).norm() < 1e-3 * halves.norm()
    kernel = torch.randn(32, 16, 3, 3).half()
    assert torch.equal(winograd_weight(kernel), winograd_weight(kernel.double()).half())


def test_only_wide_convolutions_of_whole_blocks_use_winograd() -> None:
    """The kernels read blocks of channels. The weights of an engine's key are in one form."""
    for channels_in, channels_out, uses_winograd in (
        *((640, 640, True), (320, 640, True), (960, 320, True)),
        *((320, 320, False), (640, 64, False), (660, 640, False)),
    ):
        with torch.device("meta"):
            conv, narrow = torch.nn.Conv2d(channels_in, channels_out, 3), torch.nn.Conv2d(64, 64, 3)
            block = SimpleNamespace(conv1=conv, conv2=narrow)
            winograd.replace_wide_convs(block)
        assert isinstance(block.conv1, WinogradConv) == uses_winograd and block.conv2 is narrow, channels_in


@pytest.fixture
def winograd_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Winograd's form for convolutions of any width, and keep modules for a GPU on the CPU."""
    for name in ("_MIN_WIDER_SIDE", "_MIN_NARROWER_SIDE", "_CHANNEL_BLOCK"):
        monkeypatch.setattr(winograd, name, 1)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)


@pytest.mark.usefixtures("winograd_without_gpu")
def test_validation_runs_pytorchs_own_operations(toy_folder: Path) -> None:
    """A wrong kernel would otherwise be compared with itself. It cannot be called without a GPU."""
    folder = Checkpoint(toy_folder)
    fast, plain = (load_network(folder, "unet", FP16, "cuda", plain=plain) for plain in (False, True))
    assert any(isinstance(module, WinogradConv) for module in fast.module.modules())
    names = [spec.name for spec in plain.signature.inputs]

    def run(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"noise": plain.module(*(case[name] for name in names))[0]}

    accuracy = validate(fast, SimpleNamespace(bucket=static_bucket(1, 64, 64), run=run), [])  # type: ignore[arg-type]
    assert 0 < accuracy.relative < 5e-3


class GpuTensor(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True


def test_kernels_are_used_on_gpus_except_in_validations() -> None:
    tensor = torch.zeros(1)
    on_gpu, half_on_gpu = (one.as_subclass(GpuTensor) for one in (tensor, tensor.half()))
    assert [has_kernels(one) for one in (tensor, on_gpu)] == [False, True]
    assert [has_half_kernels(one) for one in (tensor.half(), on_gpu, half_on_gpu)] == [False, False, True]
    with plain_operations():
        assert not has_kernels(on_gpu) and not has_half_kernels(half_on_gpu)
    assert has_kernels(on_gpu)


@pytest.mark.parametrize("component, precision, device, uses_winograd", [
    ("unet", FP16, "cuda", True), ("unet_guided", BF16, "cuda", True), ("unet", FP32, "cuda", False),
    ("unet", FP16, "cpu", False), ("unet_2_bands", FP16, "cuda", True),
])  # fmt: skip
@pytest.mark.usefixtures("winograd_without_gpu")
def test_unet_uses_winograd_on_gpus_in_half_precision(
    component: str, precision: Precision, device: str, uses_winograd: bool, toy_folder: Path
) -> None:
    """Only Triton kernels compute in Winograd's form, in half precision. Weights are stored in that form."""
    names = load_network(Checkpoint(toy_folder), component, precision, device).tensors()
    shape = names["mid_block.resnets.0.conv1.weight"].shape
    assert (len(shape) == 3 and shape[0] == 16) == uses_winograd and "mid_block.resnets.0.conv1.bias" in names
    plain = load_network(Checkpoint(toy_folder), component, precision, device, plain=True)  # as for TensorRT
    assert plain.layout == "plain" and plain.tensors()["mid_block.resnets.0.conv1.weight"].ndim == 4


@pytest.mark.parametrize("subfolder", FOLDERS)
def test_refuses_missing_weights(subfolder: str, folder_copy: Path) -> None:
    lost: list[str] = []

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        lost.append(max(name for name in tensors if name.endswith("weight") and "encoder.conv" not in name))
        del tensors[lost[0]]

    edit_weights(folder_copy / subfolder, lose)
    for component in components_in(subfolder):
        with pytest.raises(CheckpointError, match="lacks 1 of its network's weights, ") as refusal:
            load_network(Checkpoint(folder_copy), component, FP32)
        assert lost[0].removeprefix("text_model.") in str(refusal.value)


@pytest.mark.parametrize("subfolder", FOLDERS)
def test_refuses_weights_that_the_config_does_not_describe(subfolder: str, folder_copy: Path) -> None:
    """Such as a UNet that takes the guidance scale as an input, in the folder of another."""
    more = {"time_embedding.cond_proj.weight": torch.zeros(4, 4)}
    harmless = {"text_model.embeddings.position_ids": torch.arange(77), "logit_scale": torch.zeros(())}
    if subfolder.startswith("text"):
        edit_weights(folder_copy / subfolder, lambda tensors: tensors.update(harmless))
    for component in components_in(subfolder):
        load_network(Checkpoint(folder_copy), component, FP32)
    edit_weights(folder_copy / subfolder, lambda tensors: tensors.update(more))
    for component in components_in(subfolder):
        with pytest.raises(CheckpointError, match="describes another network than the weights beside it: time_embedd"):
            load_network(Checkpoint(folder_copy), component, FP32)


def test_pooled_text_is_of_the_end_token_also_beside_embeddings(folder_copy: Path) -> None:
    """Configs of SDXL state the end token 2, which means the largest id in a text. Embeddings have larger ones."""
    component, rows = "text_encoder_2", 4
    config = json.loads((folder_copy / component / "config.json").read_text())
    end, size = config["vocab_size"] - 1, config["vocab_size"] + 3  # of a table that was made larger before
    edit_weights(
        folder_copy / component,
        lambda tensors: tensors.update(
            {
                name: torch.cat([one, one[:3]])
                for name, one in tensors.items()
                if name.endswith("token_embedding.weight")
            }
        ),
    )
    edit_json(folder_copy / component / "config.json", vocab_size=size)
    edit_json(folder_copy / component / "config.json", eos_token_id=2)
    checkpoint = replace(Checkpoint(folder_copy), embedding_rows=rows)
    network = load_network(checkpoint, component, FP32)
    assert network.architecture["eos_token_id"] == end
    [table] = [one for one in network.module.modules() if getattr(one, "num_embeddings", 0) == size + rows]
    table.weight.data[-rows:] = table.weight.data[:rows]  # type: ignore[index,operator,union-attr]
    skip = torch.zeros(1, network.signature.inputs[1].shape[1])  # type: ignore[arg-type]

    def pooled(*ids: int) -> torch.Tensor:
        text = torch.full((1, 77), 0)
        text[0, : len(ids) + 1] = torch.tensor([*ids, end])
        return cast(torch.Tensor, network.module(text, skip)[1])

    with torch.inference_mode():
        assert torch.equal(pooled(5, size, 6), pooled(5, 0, 6)), "the first row of an embedding is that of token 0"
        assert not torch.equal(pooled(5, size, 6), pooled(5, size, 7)), "words after an embedding count"


def test_refuses_refiner_with_another_noise_schedule(folder_copy: Path, toy_plan: BuildPlan, tmp_path: Path) -> None:
    edit_json(folder_copy / "scheduler" / "scheduler_config.json", beta_end=0.02)
    with pytest.raises(CheckpointError, match="another noise schedule .*: beta_end 0.02 and 0.012.*--no-refiner"):
        build(replace(toy_plan, refiner=Checkpoint(folder_copy)), open_writable_store(tmp_path / "store"))


def key_of(folder: Path, component: str, target: Target) -> str:
    network = load_network(Checkpoint(folder), component, FP32)
    return engine_key(network, target, dynamic_bucket(network.multiple))


@pytest.mark.parametrize("subfolder", FOLDERS)
def test_key_is_independent_of_provenance_and_weights(
    subfolder: str, folder_copy: Path, toy_folder: Path, target: Target
) -> None:
    edit_weights(folder_copy / subfolder, lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
    entries: dict[str, object] = {"scaling_factor": 0.3} if subfolder == "vae" else {}  # applied outside of the engine
    provenance = {"_name_or_path": "someone/else", "_diffusers_version": "0.1", "transformers_version": "4.0"}
    edit_config(folder_copy / subfolder, torch_dtype="float16", **provenance, **entries)
    for component in components_in(subfolder):
        assert key_of(folder_copy, component, target) == key_of(toy_folder, component, target)


@pytest.mark.parametrize(
    "component, entries",
    [
        ("text_encoder", {"hidden_act": "gelu"}),
        ("text_encoder_2", {"layer_norm_eps": 1e-4}),
        ("unet", {"norm_eps": 1e-4}),
        ("vae_decoder", {"norm_num_groups": 2}),
    ],
)
def test_key_depends_on_the_architecture(
    component: str, entries: dict[str, object], folder_copy: Path, toy_folder: Path, target: Target
) -> None:
    edit_config(folder_copy / CLASSES[component][1], **entries)
    assert key_of(folder_copy, component, target) != key_of(toy_folder, component, target)


def test_key_depends_on_target_bucket_precision_layout_and_libraries(
    toy_folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Checkpoint(toy_folder)
    network = load_network(folder, "unet", FP32)
    bucket = dynamic_bucket(network.multiple)
    keys = [
        engine_key(network, target, bucket),
        engine_key(network, replace(target, product="x86_64_v2"), bucket),
        engine_key(network, target, dynamic_bucket(network.multiple, max_batch=8)),
        engine_key(load_network(folder, "unet", BF16), target, bucket),
        engine_key(replace(network, layout="channels_last"), target, bucket),
    ]
    for library in ("diffusers", "transformers"):
        install_metadata(tmp_path / library, library, "9")
        monkeypatch.syspath_prepend(tmp_path / library)
        keys.append(engine_key(network, target, bucket))
    assert len(set(keys)) == len(keys) == 7
