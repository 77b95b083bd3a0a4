"""Write models of real architectures with seeded random weights, for benchmarks without the public weights.

    python -m engine_builder.checkpoints.random_models sdxl OUT [--refiner]
    python -m engine_builder.checkpoints.random_models sd OUT
    python -m engine_builder.checkpoints.random_models controlnet OUT [--kind full|mid|small]
    python -m engine_builder.checkpoints.random_models ip-adapter OUT [--kind plain|plus]
    python -m engine_builder.checkpoints.random_models lora OUT [--kind unet|all] [--rank 16]

The settings are those of stabilityai/stable-diffusion-xl-base-1.0, its -refiner-1.0 and
stable-diffusion-v1-5/stable-diffusion-v1-5 on the Hugging Face Hub. Tokenizers are copied from a small model, because a
prompt's tokens do not change the time of an image. Images are noise. SDXL's VAE has no force_upcast, like those made
for fp16 (madebyollin/sdxl-vae-fp16-fix), so an fp16 build has it in fp16.

A "full" ControlNet has the blocks of SDXL's UNet, like diffusers/controlnet-canny-sdxl-1.0. "mid" has one transformer
layer in the last level, and "small" has no attention, like the -mid and -small models of the same authors. IP-Adapters
are OUT/KIND.safetensors and the folder OUT/image_encoder, a CLIP ViT-H/14: "plain" has the shapes of
`ip-adapter_sdxl_vit-h`, "plus" those of `ip-adapter-plus_sdxl_vit-h`. A LoRA adapter is OUT/KIND.safetensors, for the
linears of the UNet's transformers, "all" also for the linears of the text encoders.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Config = dict[str, Any]
Configs = Mapping[str, Config]
UNET: Config = {
    "sample_size": 128, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "cross_attention_dim": 2048, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816, "use_linear_projection": True,
}  # fmt: skip
REFINER_UNET: Config = UNET | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (384, 768, 1536, 1536), "attention_head_dim": (6, 12, 24, 24),
    "transformer_layers_per_block": 4, "cross_attention_dim": 1280, "projection_class_embeddings_input_dim": 2560,
}  # fmt: skip
VAE: Config = {
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4, "norm_num_groups": 32,
    "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": False,
}  # fmt: skip
TEXT_ENCODER: Config = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "hidden_act": "quick_gelu", "projection_dim": 768,
}  # fmt: skip
TEXT_ENCODER_2: Config = TEXT_ENCODER | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
CONFIGS: Configs = {
    "unet": UNET,
    "refiner_unet": REFINER_UNET,
    "vae": VAE,
    "text_encoder": TEXT_ENCODER,
    "text_encoder_2": TEXT_ENCODER_2,
}
"""Network -> its config: UNets, AutoencoderKL, CLIP ViT-L's text encoder, OpenCLIP bigG's."""
SD_CONFIGS: Configs = {
    "unet": {
        "sample_size": 64, "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3, "block_out_channels": (320, 640, 1280, 1280),
        "attention_head_dim": 8,  # the number of heads
        "cross_attention_dim": 768,
    },
    "vae": VAE | {"sample_size": 512, "scaling_factor": 0.18215},
    "text_encoder": TEXT_ENCODER,
}  # fmt: skip
_SD_FILES: Configs = {
    "scheduler/scheduler_config.json": {
        "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "clip_sample": False, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True,
        "steps_offset": 1, "trained_betas": None,
    },
    "model_index.json": {
        "_class_name": "StableDiffusionPipeline", "feature_extractor": [None, None], "safety_checker": [None, None],
        "requires_safety_checker": False, "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
    },
}  # fmt: skip
IMAGE_ENCODER: Config = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "patch_size": 14, "image_size": 224, "projection_dim": 1024, "hidden_act": "gelu",
}  # fmt: skip
ControlNetKind = Literal["full", "mid", "small"]
IpAdapterKind = Literal["plain", "plus"]
IP_ADAPTER_KINDS: tuple[IpAdapterKind, ...] = ("plain", "plus")
LoraKind = Literal["unet", "all"]
LORA_KINDS: tuple[LoraKind, ...] = ("unet", "all")
_LORA_LAYERS = re.compile(r".*\.(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)|(q|k|v|out)_proj|fc[12])")
_TOKENS, _PLUS_TOKENS, _PLUS_WIDTH, _PLUS_LAYERS, _PLUS_INNER = 4, 16, 1280, 4, 20 * 64
Shapes = dict[str, tuple[int, ...]]


def make_network(name: str, configs: Configs = CONFIGS) -> Any:
    """Make a network of `configs` on the current default device and dtype."""
    import diffusers
    import transformers

    text_encoders = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}
    if name in text_encoders:
        return getattr(transformers, text_encoders[name])(transformers.CLIPTextConfig(**configs[name]))
    return getattr(diffusers, "AutoencoderKL" if name == "vae" else "UNet2DConditionModel")(**configs[name])


def write_sdxl(
    folder: Path,
    tokenizers: Path,
    refiner: bool = False,
    seed: int = 0,
    unet_seed: int | None = None,
    configs: Configs = CONFIGS,
) -> None:
    """Write the base in fp16, and with `refiner` also the refiner, to `folder/refiner`.

    `tokenizers`: a model folder to copy tokenizers from. `unet_seed`: of the base's UNet; None: `seed`.
    """
    networks = {name: folder / name for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    if refiner:
        networks["refiner_unet"] = folder / "refiner" / "unet"
    _save_networks(networks, configs, seed, {} if unet_seed is None else {"unet": unet_seed})
    for name in ("scheduler", "tokenizer", "tokenizer_2", "model_index.json"):
        _copy(tokenizers / name, folder / name)
    if refiner:
        for name in ("scheduler", "tokenizer_2", "model_index.json"):
            _copy(tokenizers / "refiner" / name, folder / "refiner" / name)
        for name in ("vae", "text_encoder_2"):
            (folder / "refiner" / name).unlink(missing_ok=True)
            (folder / "refiner" / name).symlink_to(folder.resolve() / name, target_is_directory=True)


def write_sd(folder: Path, tokenizers: Path, seed: int = 0, configs: Configs = SD_CONFIGS) -> None:
    """Write Stable Diffusion 1.5 in fp16. `tokenizers`: as for `write_sdxl`."""
    _save_networks({name: folder / name for name in configs}, configs, seed)
    _copy(tokenizers / "tokenizer", folder / "tokenizer")
    (folder / "scheduler").mkdir(exist_ok=True)
    for name, entries in _SD_FILES.items():
        (folder / name).write_text(json.dumps(entries, indent=2) + "\n")


def _save_networks(
    folders: Mapping[str, Path], configs: Configs, seed: int, seeds: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Write networks of `configs`, by name, each to its folder. `seeds`: by network, in place of `seed`."""
    for name, folder in folders.items():
        with _seeded_half(seeds.get(name, seed)):
            make_network(name, configs).eval().save_pretrained(folder, max_shard_size="20GB")


@contextmanager
def _seeded_half(seed: int) -> Iterator[None]:
    """Make networks in fp16 on the fastest device, with weights of a seed."""
    torch.manual_seed(seed)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(json.loads(source.read_text()), indent=2) + "\n")


def controlnet_config(kind: ControlNetKind) -> Config:
    """Return the config of a ControlNet for SDXL."""
    entries = {key: value for key, value in UNET.items() if key not in ("sample_size", "up_block_types")}
    if kind == "mid":
        entries["transformer_layers_per_block"] = (0, 0, 1)
    if kind == "small":
        entries |= {"down_block_types": ("DownBlock2D",) * 3, "mid_block_type": "UNetMidBlock2D"}
    return entries


def write_controlnet(folder: Path, kind: ControlNetKind = "full", seed: int = 0) -> None:
    """Write a ControlNet in fp16. Its outputs are small, so that images with it are not broken."""
    import diffusers

    network_class: Any = diffusers.ControlNetModel
    with _seeded_half(seed):
        network = network_class(**controlnet_config(kind))
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.startswith("controlnet_"):  # zeros, which training changes
                    parameter.normal_(std=0.01)
        network.save_pretrained(folder, max_shard_size="20GB")


def ip_adapter_shapes(kind: IpAdapterKind) -> Shapes:
    """Return the shapes of an IP-Adapter's tensors, by name."""
    context, encoder = UNET["cross_attention_dim"], IMAGE_ENCODER
    of_projection: Shapes = {
        "proj.weight": (_TOKENS * context, int(encoder["projection_dim"])), "proj.bias": (_TOKENS * context,),
        "norm.weight": (context,), "norm.bias": (context,),
    }  # fmt: skip
    if kind == "plus":
        of_projection = _plus_shapes(int(encoder["hidden_size"]), context)
    named = {f"image_proj.{name}": shape for name, shape in of_projection.items()}
    for index, width in enumerate(_attention_widths()):
        for part in ("to_k_ip", "to_v_ip"):
            named[f"ip_adapter.{1 + 2 * index}.{part}.weight"] = (width, context)
    return named


def _plus_shapes(features: int, context: int) -> Shapes:
    width, inner = _PLUS_WIDTH, _PLUS_INNER
    named: Shapes = {
        "latents": (1, _PLUS_TOKENS, width), "proj_in.weight": (width, features), "proj_in.bias": (width,),
        "proj_out.weight": (context, width), "proj_out.bias": (context,), "norm_out.weight": (context,),
        "norm_out.bias": (context,),
    }  # fmt: skip
    for layer in range(_PLUS_LAYERS):
        attention, feed_forward = f"layers.{layer}.0", f"layers.{layer}.1"
        for norm in (f"{attention}.norm1", f"{attention}.norm2", f"{feed_forward}.0"):
            named |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
        named |= {
            f"{attention}.to_q.weight": (inner, width), f"{attention}.to_kv.weight": (2 * inner, width),
            f"{attention}.to_out.weight": (width, inner), f"{feed_forward}.1.weight": (4 * width, width),
            f"{feed_forward}.3.weight": (width, 4 * width),
        }  # fmt: skip
    return named


def _attention_widths() -> list[int]:
    """Return the width of each cross-attention of SDXL's UNet, in the order of an adapter's numbers."""
    import diffusers

    network_class: Any = diffusers.UNet2DConditionModel
    with torch.device("meta"):
        unet = network_class(**UNET)
    names = [name for name in unet.attn_processors if not name.endswith("attn1.processor")]
    return [int(unet.get_submodule(name.removesuffix(".processor")).to_k.out_features) for name in names]


def write_ip_adapter(folder: Path, kind: IpAdapterKind = "plain", seed: int = 0) -> None:
    """Write an IP-Adapter and its image encoder in fp16."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in ip_adapter_shapes(kind).items():
        is_norm = len(shape) == 1 and name.endswith("weight")
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        tensors[name] = (float(is_norm) + spread * torch.randn(shape, generator=generator)).half()
    save_file(tensors, folder / f"{kind}.safetensors")
    torch.manual_seed(seed)
    encoder: Any = CLIPVisionModelWithProjection(CLIPVisionConfig(**IMAGE_ENCODER))
    encoder.half().save_pretrained(folder / "image_encoder")


def write_lora(
    folder: Path, kind: LoraKind = "unet", rank: int = 16, seed: int = 0, configs: Configs = CONFIGS
) -> None:
    """Write a LoRA adapter in fp16, with diffusers' keys. It adds about 0.1 to products of inputs of unit variance."""
    networks = ("unet", "text_encoder", "text_encoder_2") if kind == "all" else ("unet",)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name in networks:
        with torch.device("meta"):
            network = make_network(name, configs)
        for path, module in network.named_modules():
            if isinstance(module, torch.nn.Linear) and _LORA_LAYERS.fullmatch(path):
                prefix = "" if name == "unet" else "text_model."  # which transformers 5 leaves out
                key = f"{name}.{prefix}{path.removeprefix(prefix)}"
                down = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
                up = 0.1 * torch.randn(module.out_features, rank, generator=generator) * rank**-0.5
                tensors |= {f"{key}.lora_A.weight": down.half(), f"{key}.lora_B.weight": up.half()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{kind}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_subparsers(dest="model", required=True)
    writers: dict[str, tuple[Any, Sequence[str]]] = {
        "sdxl": (write_sdxl, ()),
        "sd": (write_sd, ()),
        "controlnet": (write_controlnet, ("full", "mid", "small")),
        "ip-adapter": (write_ip_adapter, IP_ADAPTER_KINDS),
        "lora": (write_lora, LORA_KINDS),
    }
    for name, (_, kinds) in writers.items():
        model = models.add_parser(name)
        model.add_argument("out", type=Path)
        model.add_argument("--seed", type=int, default=0)
        if kinds:
            model.add_argument("--kind", choices=kinds, default=kinds[0])
        else:
            model.add_argument(
                "--tokenizers", type=Path, default=Path("data/tiny-sdxl"), help="a model folder to copy tokenizers from"
            )
        if name == "lora":
            model.add_argument("--rank", type=int, default=16)
        if name == "sdxl":
            model.add_argument("--refiner", action="store_true", help="also write the refiner, to OUT/refiner")
            model.add_argument("--unet-seed", type=int, help="of the base's UNet: a fine-tune; default: --seed")
    options = vars(parser.parse_args())
    write, _ = writers[options.pop("model")]
    out = options.pop("out")
    write(out, **options)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
