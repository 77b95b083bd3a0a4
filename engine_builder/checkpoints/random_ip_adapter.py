"""Write an IP-Adapter for SDXL of a public one's architecture with seeded random weights, for benchmarks.

`python -m engine_builder.checkpoints.random_ip_adapter OUT [--kind plain|plus] [--seed N]`

The files are OUT/KIND.safetensors and the folder OUT/image_encoder, a CLIP ViT-H/14. "plain" has the shapes of
`ip-adapter_sdxl_vit-h`, "plus" those of `ip-adapter-plus_sdxl_vit-h`.
"""

import argparse
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from engine_builder.checkpoints.random_sdxl import UNET

Kind = Literal["plain", "plus"]
KINDS: tuple[Kind, ...] = ("plain", "plus")
ENCODER: dict[str, Any] = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "patch_size": 14, "image_size": 224, "projection_dim": 1024, "hidden_act": "gelu",
}  # fmt: skip
_TOKENS, _PLUS_TOKENS, _PLUS_WIDTH, _PLUS_LAYERS, _PLUS_INNER = 4, 16, 1280, 4, 20 * 64

Shapes = dict[str, tuple[int, ...]]


def shapes(kind: Kind) -> Shapes:
    """Return the shapes of an adapter's tensors, by name."""
    context, encoder = UNET["cross_attention_dim"], ENCODER
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


def write(folder: Path, kind: Kind = "plain", seed: int = 0) -> None:
    """Write an adapter and its image encoder in fp16."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(kind).items():
        is_norm = len(shape) == 1 and name.endswith("weight")
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        tensors[name] = (float(is_norm) + spread * torch.randn(shape, generator=generator)).half()
    save_file(tensors, folder / f"{kind}.safetensors")
    torch.manual_seed(seed)
    encoder: Any = CLIPVisionModelWithProjection(CLIPVisionConfig(**ENCODER))
    encoder.half().save_pretrained(folder / "image_encoder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.kind, arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
