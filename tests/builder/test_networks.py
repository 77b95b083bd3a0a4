"""Reading checkouts: as they are published, in any of their forms, and what is refused."""

import copy
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from engine_builder import networks
from engine_builder.backends.aot_inductor.compile import (
    dynamic_bucket,
    engine_key,
    example_inputs,
    static_bucket,
)
from engine_builder.backends.tensorrt.options import Choices
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.validate import validate
from engine_builder.networks import (
    blocks,
    winograd,
)
from engine_builder.networks.blocks import channels_last_group_norm, split_into_phases, upsample
from engine_builder.networks.network import (
    ModelFolder,
    ModelFolderError,
    Reader,
    load_network,
    variant_of,
)
from engine_builder.networks.winograd import WinogradConv, transform_wide, transformed
from model.engines import components
from model.engines.components import BASE_COMPONENTS
from model.loading.target import Target
from model.store.manifest import Precision
from model.store.store import Store

TINY = Path(__file__).parents[2] / "data" / "tiny-sdxl"
PARTS = {
    "text_encoder": (CLIPTextModel, "text_encoder"),
    "text_encoder_2": (CLIPTextModelWithProjection, "text_encoder_2"),
    "unet_text": (UNet2DConditionModel, "unet"),
    "unet_time": (UNet2DConditionModel, "unet"),
    "unet": (UNet2DConditionModel, "unet"),
    "vae_decoder": (AutoencoderKL, "vae"),
}


def edit_config(part: Path, **entries: object) -> None:
    file = part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def drop_key(part: Path, key: str) -> None:
    file = part / "config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != key}))


@pytest.mark.parametrize("component", BASE_COMPONENTS)
@pytest.mark.parametrize(
    "form", [{"max_shard_size": "3KB"}, {"variant": "fp16"}, {"variant": "fp16", "max_shard_size": "3KB"}]
)
def test_every_form_of_a_checkout_gives_the_same_tensors(
    form: dict[str, str], component: str, folder_copy: Path
) -> None:
    cls, part = PARTS[component]
    network: Any = cls.from_pretrained(folder_copy / part)
    if "variant" in form:
        # What such a checkout holds: the same numbers, rounded to half precision.
        network = network.half()
        shutil.rmtree(folder_copy / part)
        network.save_pretrained(folder_copy / part)
    plain = load_network(ModelFolder(folder_copy), component, "fp16").tensors()
    shutil.rmtree(folder_copy / part)
    network.save_pretrained(folder_copy / part, **form)
    files = [file.name for file in (folder_copy / part).glob("*.safetensors")]
    assert all(("fp16" in name) == ("variant" in form) for name in files)
    assert (len(files) > 1) == ("max_shard_size" in form)

    read = load_network(ModelFolder(folder_copy), component, "fp16").tensors()
    # The text's is one product: see `UnetTextNetwork`.
    assert read.keys() == plain.keys() and len(read) >= (1 if component == "unet_text" else 8)
    for name, tensor in plain.items():
        assert tensor.dtype == torch.float16 or not tensor.is_floating_point()
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("component", ["text_encoder_2", "unet"])
def test_fp16_weights_are_read_where_the_plain_ones_are_not_whole(component: str, folder_copy: Path) -> None:
    """As in a Hub's cache that several programs fetch to, one of which broke off."""
    cls, part = PARTS[component]
    plain = load_network(ModelFolder(folder_copy), component, "fp16").tensors()
    network: Any = cls.from_pretrained(folder_copy / part)
    network.save_pretrained(folder_copy / part, max_shard_size="3KB")
    (folder_copy / part / ("model.safetensors" if part != "unet" else "diffusion_pytorch_model.safetensors")).unlink()
    network.half().save_pretrained(folder_copy / part, variant="fp16")
    assert variant_of(ModelFolder(folder_copy), part) is None
    sorted((folder_copy / part).glob("*-of-*.safetensors"))[-1].unlink()
    assert variant_of(ModelFolder(folder_copy), part) == "fp16"
    read = load_network(ModelFolder(folder_copy), component, "fp16").tensors()
    assert read.keys() == plain.keys() and all(torch.equal(read[name], plain[name]) for name in plain)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "unet", "vae"])
def test_tensors_have_the_checkpoint_s_names(part: str, toy_folder: Path) -> None:
    """A UNet's are shared out among its three components, each to one; what is stored in another form has a name of
    its own."""
    from safetensors import safe_open

    [file] = (toy_folder / part).glob("*.safetensors")
    with safe_open(file, "pt") as checkpoint:
        names = {name.removeprefix("text_model.") for name in checkpoint.keys()}
    read = [
        name.removeprefix("text_model.")
        for component in BASE_COMPONENTS
        if PARTS[component][1] == part
        for name in load_network(ModelFolder(toy_folder), component, "fp32").tensors()
    ]
    assert len(set(read)) == len(read)
    # Positions are computed, not stored; a VAE's encoder is not served.
    assert {name for name in read if not name.endswith("position_ids")} == {
        stored_as(name)
        for name in names
        if not name.startswith(("encoder.down", "encoder.mid", "encoder.conv", "quant_conv"))
    }


def stored_as(name: str) -> str:
    """What a checkpoint's tensor is part of."""
    if ".attn2.to_k." in name or ".attn2.to_v." in name:
        return "keys_values.0.weight"
    if ".time_emb_proj." in name:
        return f"biases.{name.rpartition('.')[2]}"
    return (
        re.sub(r"(attn1\.to_[qkv]|self_attn\.[qkv]_proj)\.", lambda found: f"{found[1].split('.')[0]}.to_qkv.", name)
        .replace(".ff.net.0.proj.", ".ff.net.0.interleaved.")
        .replace(".upsamplers.0.conv.", ".upsamplers.0.phases.")
    )


def test_a_part_is_read_once_for_all_of_its_components(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {name: load_network(ModelFolder(toy_folder), name, "fp32").tensors() for name in BASE_COMPONENTS}
    read: list[str] = []
    load = networks._load

    def counted(library: str, name: str, folder: ModelFolder, part: str, dtype: torch.dtype) -> torch.nn.Module:
        read.append(f"{part} {dtype}")
        return load(library, name, folder, part, dtype)

    monkeypatch.setattr(networks, "_load", counted)
    reader = Reader()
    together = {name: load_network(ModelFolder(toy_folder), name, "fp32", reader=reader) for name in BASE_COMPONENTS}
    parts = ("text_encoder", "text_encoder_2", "unet", "vae")
    assert read == [f"{part} torch.float32" for part in parts]
    for name, tensors in alone.items():
        again = together[name].tensors()
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())
    load_network(ModelFolder(toy_folder), "vae_decoder", "bf16", reader=reader)
    assert read[4:] == ["vae torch.bfloat16"]


@pytest.mark.parametrize("refiner", [False, True])
def test_a_unet_in_three_parts_predicts_what_diffusers_predicts(refiner: bool) -> None:
    folder = ModelFolder(TINY / "refiner" if refiner else TINY)
    names = ("refiner_unet_text", "refiner_unet_time", "refiner_unet") if refiner else BASE_COMPONENTS[2:5]
    text, time, unet = [load_network(folder, name, "fp32") for name in names]
    whole = UNet2DConditionModel.from_pretrained(folder.root / "unet", torch_dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    sample, hidden = torch.randn(3, 4, 32, 24, generator=random), torch.randn(3, 77, 224, generator=random)
    hidden = hidden[..., : whole.config.cross_attention_dim]
    pooled, timestep = torch.randn(3, 128, generator=random), torch.tensor([951.0, 20.0, 381.0])
    time_ids = 256 * torch.rand(3, 5 if refiner else 6, generator=random)
    with torch.inference_mode():
        added = {"text_embeds": pooled, "time_ids": time_ids}
        expected = whole(sample, timestep, encoder_hidden_states=hidden, added_cond_kwargs=added, return_dict=False)[0]
        got = unet.module(sample, *time.module(timestep, pooled, time_ids), *text.module(hidden))[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_the_unet_for_guided_rows_is_the_unet_of_rows_without_a_text() -> None:
    """Bit for bit; and of the half that has no text it reads neither text nor latents, which are the other half's."""
    plain, guided = (load_network(ModelFolder(TINY), name, "fp32") for name in ("unet", "unet_guided"))
    assert guided.tensors().keys() == plain.tensors().keys() and guided.signature == plain.signature
    inputs = example_inputs(plain.signature, 4, 64, 96, "cpu")
    sample, silent = inputs["sample"].clone(), inputs["keys_values"].clone()
    sample[2:], silent[2:] = sample[:2], 0
    inputs["sample"][2:] = inputs["keys_values"][2:] = float("nan")
    with torch.inference_mode():
        expected = plain.module(sample, inputs["time_embeds"], silent)[0]
        got = guided.module(inputs["sample"], inputs["time_embeds"], inputs["keys_values"])[0]
        text = load_network(ModelFolder(TINY), "unet_text", "fp32").module(torch.zeros(1, 77, 224))[0]
    assert torch.equal(got, expected)
    assert not text.any()  # zeros are what no text comes to


def test_the_unet_of_rows_that_are_told_no_text_does_not_read_one() -> None:
    plain, untold = (load_network(ModelFolder(TINY), name, "fp32") for name in ("unet", "unet_unconditional"))
    assert untold.tensors().keys() == plain.tensors().keys() and untold.signature == plain.signature
    inputs = example_inputs(plain.signature, 2, 64, 96, "cpu")
    sample, embeds, texts = inputs["sample"], inputs["time_embeds"], inputs["keys_values"]
    with torch.inference_mode():
        expected = plain.module(sample, embeds, torch.zeros_like(texts))[0]
        assert torch.equal(untold.module(sample, embeds, torch.full_like(texts, float("nan")))[0], expected)


def test_a_gpu_s_build_has_engines_for_guided_rows(toy_folder: Path, folder_copy: Path, target: Target) -> None:
    gpu = replace(target, device="cuda", product="h200", capability="sm90")
    sizes = ((1, 512, 512), (2, 512, 512), (5, 512, 512), (8, 512, 768))
    plan = BuildPlan("toy", ModelFolder(toy_folder), None, gpu, "fp32", sizes)
    names = (components.UNET, components.UNET_UNCONDITIONAL, components.UNET_GUIDED)
    assert {*names} <= {*plan.components}
    networks = [load_network(ModelFolder(toy_folder), name, "fp32", "meta") for name in names]
    unet, unconditional, guided = networks
    assert plan.buckets_of(unconditional) == [static_bucket(1, 512, 512)]
    assert plan.buckets_of(guided) == [static_bucket(8, 512, 768)]  # two rows of 512x512 are a call each
    bucket = static_bucket(2, 512, 512)
    assert len({engine_key(network, gpu, bucket) for network in networks}) == 3

    pair = replace(plan, sizes=((2, 512, 512), (1, 512, 768)))  # with no engine for the row that is told a text
    assert not {components.UNET_UNCONDITIONAL} & {*pair.components}
    assert pair.buckets_of(guided) == [bucket]

    index = folder_copy / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"force_zeros_for_empty_prompt": False}))
    for other in (
        replace(plan, target=target),  # whose loop cannot use them
        replace(plan, sizes=((1, 512, 512), (5, 512, 512))),
        replace(plan, tensorrt=Choices()),
        replace(plan, base=ModelFolder(folder_copy)),  # whose unconditional text is an empty one
    ):
        assert not {*components.GUIDED} & {*other.components}


@pytest.mark.parametrize(("small", "large"), [(0, 2**40), (0, 0), (2**40, 2**40)])
def test_the_fast_form_of_group_norm_is_group_norm(small: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's form, run here: the statistics are exact also where the mean is far from zero."""
    monkeypatch.setattr(blocks, "_SMALL", small)
    monkeypatch.setattr(blocks, "_LARGE", large)
    norm = torch.nn.GroupNorm(8, 64)
    # Weights of up to 2.4: one of 3.4, as other draws have, brings fp32's own rounding past what is allowed below.
    drawn = torch.Generator().manual_seed(3)
    torch.nn.init.normal_(norm.weight, generator=drawn)
    torch.nn.init.normal_(norm.bias, generator=drawn)
    for height, width in ((8, 8), (24, 16), (26, 38), (13, 19), (256, 256)):
        noise = torch.randn(2, 64, height, width, generator=torch.Generator().manual_seed(0))
        hidden = 3 * noise + 50
        torch.testing.assert_close(channels_last_group_norm(norm, hidden), norm(hidden), rtol=1e-4, atol=1e-4)
        hidden = noise + 100  # where sums of squares are off by 1e-3
        exact = F.group_norm(hidden.double(), 8, norm.weight.double(), norm.bias.double(), norm.eps).float()
        torch.testing.assert_close(channels_last_group_norm(norm, hidden), exact, rtol=0, atol=2e-4)


def in_phases(conv: torch.nn.Conv2d, hidden: torch.Tensor) -> torch.Tensor:
    upsampler = SimpleNamespace(conv=conv)
    split_into_phases(upsampler)
    upsampler.phases.to(memory_format=torch.channels_last)
    return upsample(upsampler, hidden)


def upsampled(conv: torch.nn.Conv2d, hidden: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = conv(torch.nn.functional.interpolate(hidden, scale_factor=2.0, mode="nearest"))
    return out


@torch.inference_mode()
@pytest.mark.parametrize("rows, height, width", [(1, 8, 8), (3, 7, 5), (2, 1, 6), (2, 16, 9)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_upsampling_in_phases_is_a_convolution_of_twice_the_picture(
    layout: torch.memory_format, rows: int, height: int, width: int
) -> None:
    conv: Any = torch.nn.Conv2d(6, 10, 3, padding=1, dtype=torch.float64)
    conv = conv.to(memory_format=layout)
    hidden = torch.randn(rows, 6, height, width, dtype=torch.float64).to(memory_format=layout)
    got = in_phases(conv, hidden)
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, upsampled(conv, hidden), rtol=1e-12, atol=1e-12)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_upsampling_in_phases_rounds_as_little_as_the_convolution(dtype: torch.dtype) -> None:
    conv = torch.nn.Conv2d(128, 128, 3, padding=1, dtype=torch.float64).to(dtype)
    hidden = torch.randn(2, 128, 16, 16).to(dtype)
    # What half precision rounds after the convolution, before its bias, is the CPU's and not the weights'.
    torch.nn.init.zeros_(conv.bias)
    exact = upsampled(copy.deepcopy(conv).double(), hidden.double())

    def error(out: torch.Tensor) -> float:
        return float((out.double() - exact).norm() / exact.norm())

    plain, phases = error(upsampled(conv, hidden)), error(in_phases(conv, hidden))
    assert 0 < phases < 1.5 * plain


@torch.inference_mode()
def test_a_convolution_by_tiles_has_the_weights_of_winograd_s_filtering() -> None:
    """A^T [(weights) (B^T tile B)] A is the convolution of a tile, with the matrices of the literature."""
    conv = torch.nn.Conv2d(5, 7, 3, bias=False, dtype=torch.float64)
    tile = torch.randn(5, 4, 4, dtype=torch.float64)
    into = torch.tensor([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=torch.float64)
    out = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, -1]], dtype=torch.float64)
    places = (into @ tile @ into.T).flatten(1)  # [in, 16]
    weights = transformed(conv.weight)
    assert weights.shape == (16, 7, 5) and weights.is_contiguous()
    products = torch.einsum("pnc,cp->np", weights, places).unflatten(1, (4, 4))
    torch.testing.assert_close(out @ products @ out.T, conv(tile[None])[0], rtol=1e-12, atol=1e-12)


def test_weights_of_tiles_are_rounded_once() -> None:
    kernel = torch.randn(32, 16, 3, 3).half()
    assert torch.equal(transformed(kernel), transformed(kernel.double()).half())


@torch.inference_mode()
def test_a_convolution_by_tiles_is_pytorch_s_own_where_it_is_called() -> None:
    conv = torch.nn.Conv2d(48, 40, 3, padding=1, dtype=torch.float64)
    hidden = torch.randn(2, 48, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(WinogradConv(conv)(hidden), conv(hidden), rtol=1e-12, atol=1e-12)
    halves = WinogradConv(conv.half())(hidden.half()).double()
    assert (halves - conv.double()(hidden)).norm() < 1e-3 * halves.norm()


def test_an_engine_of_our_kernels_is_held_against_pytorch_s_own_operations(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kernel that is wrong on some GPU would be compared with itself. Here it could not even be called."""
    for name in ("_CHANNELS", "_FEWEST", "_BLOCK"):
        monkeypatch.setattr(winograd, name, 1)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # there may be no such device
    folder = ModelFolder(toy_folder)
    tiled, plain = (load_network(folder, "unet", "fp16", "cuda", plain=plain) for plain in (False, True))
    assert any(isinstance(module, WinogradConv) for module in tiled.module.modules())
    names = [spec.name for spec in plain.signature.inputs]

    def run(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"noise": plain.module(*(case[name] for name in names))[0]}

    accuracy = validate(tiled, SimpleNamespace(bucket=static_bucket(1, 64, 64), run=run), [])  # type: ignore[arg-type]
    assert 0 < accuracy.relative < 5e-3

    tensor: Any = SimpleNamespace(is_cuda=True)
    assert blocks._has_kernels(tensor)
    with blocks.plain_operations():
        assert not blocks._has_kernels(tensor)
    assert blocks._has_kernels(tensor)


@pytest.mark.parametrize("before, after, by_tiles", [
    (640, 640, True), (320, 640, True), (960, 320, True), (320, 320, False), (640, 64, False), (660, 640, False),
])  # fmt: skip
def test_wide_convolutions_alone_are_computed_by_tiles(before: int, after: int, by_tiles: bool) -> None:
    with torch.device("meta"):
        block = SimpleNamespace(conv1=torch.nn.Conv2d(before, after, 3), conv2=torch.nn.Conv2d(64, 64, 3))
        transform_wide(block)
    assert isinstance(block.conv1, WinogradConv) == by_tiles and isinstance(block.conv2, torch.nn.Conv2d)


@pytest.mark.parametrize("component", ["unet", "unet_unconditional", "unet_guided"])
@pytest.mark.parametrize("precision, device, by_tiles", [
    ("fp16", "cuda", True), ("bf16", "cuda", True), ("fp32", "cuda", False), ("fp16", "cpu", False),
])  # fmt: skip
def test_a_unet_is_computed_by_tiles_on_gpus_in_half_precision(
    component: str, precision: Precision, device: str, by_tiles: bool, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of Triton do that, and a release keeps a GPU's weights apart from others'."""
    monkeypatch.setattr(winograd, "_CHANNELS", 1)
    monkeypatch.setattr(winograd, "_FEWEST", 1)
    monkeypatch.setattr(winograd, "_BLOCK", 1)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # there may be no such device
    names = load_network(ModelFolder(toy_folder), component, precision, device).tensors()
    form = names["mid_block.resnets.0.conv1.weight"].shape
    assert (len(form) == 3 and form[0] == 16) == by_tiles and "mid_block.resnets.0.conv1.bias" in names
    plain = load_network(ModelFolder(toy_folder), component, precision, device, plain=True)  # as TensorRT takes it
    assert plain.layout == "plain" and plain.tensors()["mid_block.resnets.0.conv1.weight"].ndim == 4


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no unet": (lambda folder: shutil.rmtree(folder / "unet"), "no unet/config.json"),
    "no second text encoder": (
        lambda folder: shutil.rmtree(folder / "text_encoder_2"),
        "no text_encoder_2/config.json",
    ),
    "no first text encoder": (lambda folder: shutil.rmtree(folder / "text_encoder"), "no text_encoder/config.json"),
    "no scheduler": (lambda folder: shutil.rmtree(folder / "scheduler"), "no scheduler/scheduler_config.json"),
    "a config that is no JSON": (lambda folder: (folder / "unet" / "config.json").write_text("{"), "is not JSON"),
    "an index that is a list": (lambda folder: (folder / "model_index.json").write_text("[]"), "is no JSON object"),
    "a config without a key": (lambda folder: drop_key(folder / "vae", "scaling_factor"), "no scaling_factor"),
    "scaling by nothing": (lambda folder: edit_config(folder / "vae", scaling_factor=None), "scaling_factor is None"),
    "scaling by zero": (lambda folder: edit_config(folder / "vae", scaling_factor=0), "scaling_factor is 0"),
    "a size for each side": (lambda folder: edit_config(folder / "unet", sample_size=[32, 32]), r"\[32, 32\]; give a"),
    "a file cut short": (
        lambda folder: os.truncate(folder / "unet" / "diffusion_pytorch_model.safetensors", 5000),
        "unet cannot be loaded",
    ),
    "a pointer to a file": (
        lambda folder: (folder / "text_encoder" / "model.safetensors").write_text("version https://git-lfs.github.com"),
        "text_encoder cannot be loaded",
    ),
    "pickled weights": (
        lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(
            folder / "vae" / "diffusion_pytorch_model.bin"
        ),
        "vae has no .safetensors file",
    ),
    "a UNet of Stable Diffusion 1 or 2": (
        lambda folder: edit_config(
            folder / "unet", addition_embed_type=None, projection_class_embeddings_input_dim=None
        ),
        "unet is not SDXL.s: its addition_embed_type is None",
    ),
    "a UNet for inpainting": (
        lambda folder: edit_config(folder / "unet", in_channels=9),
        "takes 9 channels and the VAE gives 4",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_that_is_no_sdxl_is_refused_with_a_sentence(
    what: str, folder_copy: Path, store_copy: Store, plan_of: Callable[[Path, str], BuildPlan]
) -> None:
    change, says = REFUSED[what]
    change(folder_copy)
    with pytest.raises(ModelFolderError, match=says) as refusal:
        build(plan_of(folder_copy, "refused"), store_copy)
    assert str(folder_copy) in str(refusal.value)
    assert not [name for name in store_copy.records("drafts") if name.startswith("refused.")]


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_weights_that_are_missing_are_never_random_ones(
    component: str, folder_copy: Path, edit_weights: Callable[..., None]
) -> None:
    part = folder_copy / PARTS[component][1]
    lost: list[str] = []

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        lost.append(max(name for name in tensors if name.endswith("weight") and "encoder.conv" not in name))
        del tensors[lost[0]]

    edit_weights(part, lose)
    with pytest.raises(ModelFolderError, match="lacks 1 of its network's weights, ") as refusal:
        load_network(ModelFolder(folder_copy), component, "fp32")
    assert lost[0].removeprefix("text_model.") in str(refusal.value)


def test_a_refiner_of_another_noise_schedule_is_refused(
    folder_copy: Path, toy_folder: Path, store_copy: Store, toy_plan: BuildPlan
) -> None:
    file = folder_copy / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"beta_end": 0.02}))
    with pytest.raises(ModelFolderError, match="another noise schedule"):
        build(replace(toy_plan, refiner=ModelFolder(folder_copy), model="refused"), store_copy)


def key_of(folder: Path, component: str, target: Target) -> str:
    network = load_network(ModelFolder(folder), component, "fp32")
    return engine_key(network, target, dynamic_bucket(network.multiple))


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_where_a_network_comes_from_does_not_change_its_engine_s_key(
    component: str, folder_copy: Path, toy_folder: Path, target: Target, edit_weights: Callable[..., None]
) -> None:
    part = folder_copy / PARTS[component][1]
    edit_weights(part, lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
    edit_config(
        part, _name_or_path="someone/else", _diffusers_version="0.1", transformers_version="4.0", torch_dtype="float16"
    )
    if component == "vae_decoder":
        edit_config(part, scaling_factor=0.3)  # applied outside of the engine
    assert key_of(folder_copy, component, target) == key_of(toy_folder, component, target)


@pytest.mark.parametrize(
    "component, entries",
    [
        ("text_encoder", {"hidden_act": "gelu"}),
        ("text_encoder_2", {"layer_norm_eps": 1e-4}),
        ("unet", {"norm_eps": 1e-4}),
        ("unet", {"flip_sin_to_cos": False}),
        ("vae_decoder", {"norm_num_groups": 2}),
    ],
)
def test_another_architecture_is_another_key(
    component: str, entries: dict[str, object], folder_copy: Path, toy_folder: Path, target: Target
) -> None:
    edit_config(folder_copy / PARTS[component][1], **entries)
    assert key_of(folder_copy, component, target) != key_of(toy_folder, component, target)


def test_the_key_tells_targets_buckets_precisions_and_layouts_apart(toy_folder: Path, target: Target) -> None:
    folder = ModelFolder(toy_folder)
    network = load_network(folder, "unet", "fp32")
    bucket = dynamic_bucket(network.multiple)
    keys = [
        engine_key(network, target, bucket),
        engine_key(network, replace(target, product="x86_64_v2"), bucket),
        engine_key(network, target, dynamic_bucket(network.multiple, max_rows=8)),
        engine_key(load_network(folder, "unet", "bf16"), target, bucket),
        engine_key(replace(network, layout="channels_last"), target, bucket),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_the_key_of_another_version_of_a_library_is_another(
    library: str, toy_folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version
    before = key_of(toy_folder, "unet", target)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9" if name == library else installed(name))
    assert key_of(toy_folder, "unet", target) != before
