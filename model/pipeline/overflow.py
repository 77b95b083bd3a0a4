"""Where an image became NaN or infinite, and what of its request may be the cause.

Each check is one reduction on the device, for which the host does not wait. They are read together with the pixels.
"""

from collections.abc import Iterator, Sequence

import torch

from model.errors import BrokenImage, OverflowingRequest
from model.images.encode import broken_image
from model.pipeline.request_plan import RequestPlan
from model.validation import format_value

TEXT, IMAGE, LATENTS, PIXELS = CHECKS = ("text", "image", "latents", "pixels")
"""What is checked, in the order in which it is made: prompts, the input image's latents, latents after the last step,
decoded pixels."""
_PLACES = {
    TEXT: "in the encoded prompts",
    IMAGE: "in the latents of the input image",
    LATENTS: "during denoising, before the VAE decoder",
    PIXELS: "in the VAE decoder",
}
_LARGEST_LATENT = 100.0  # trained models stay below 30. Larger latents overflow in any VAE decoder in fp16
_LARGEST_WEIGHT, _LARGEST_GUIDANCE = 1.5, 15.0  # up to these, a model that overflows is the cause
_FROM_MODEL = (
    "The text encoders or the UNet overflowed: build the model in a precision with a larger range (`preheat build "
    "--precision bf16`)."
)


def is_finite(*tensors: torch.Tensor, largest: float = torch.finfo(torch.float32).max) -> torch.Tensor:
    """Return bool [1] on the tensors' device: true if no value is NaN, infinite or larger than `largest`."""
    # NaN survives minimum and maximum, and no comparison with it is true. Each operation delays the image's first step.
    extremes = torch.cat([extreme.view(1) for tensor in tensors for extreme in tensor.aminmax()])
    return (extremes.float().abs() <= largest).all().view(1)


def latents_are_sane(latents: torch.Tensor) -> torch.Tensor:
    """Return bool [1]: true if a VAE decoder can be expected to decode these latents."""
    return is_finite(latents, largest=_LARGEST_LATENT)


def broken_images(plan: RequestPlan, indices: Sequence[int], images: int, check: str) -> BrokenImage:
    """Return the error for images with NaN or infinity: the `indices` of them among `images`.

    `check`: the first of CHECKS that failed. An OverflowingRequest if the request has values that may be the cause.
    """
    suspects = list(_suspects(plan, check))
    if not suspects:
        return broken_image(indices, images, _PLACES[check], _FROM_MODEL if check in (TEXT, LATENTS) else None)
    numbers = ", ".join(map(str, indices))
    return OverflowingRequest(
        suspects[0][0],
        f"image {numbers} of {images} (counted from 0) has NaN or infinite values, which began {_PLACES[check]}. The "
        f"request has {', '.join(text for _, text in suspects)}.",
    )


def _suspects(plan: RequestPlan, check: str) -> Iterator[tuple[str, str]]:
    """Yield the field and a description of each value of a request that may have made a result overflow."""
    params = plan.params
    if check not in (TEXT, LATENTS):
        return
    for name, scale in params.loras:
        if scale:
            number = f"scale {scale:g}" if isinstance(scale, float) else "scales by block"
            yield "loras", f"the adapter {format_value(name)} with {number}"
    chunks = [text for one in plan.passes for texts in one.texts.values() for text in texts]
    weight = max((abs(weight) for text in chunks for row in text.weights or () for weight in row), default=1.0)
    if weight > _LARGEST_WEIGHT:
        yield "prompt", f"prompt weights up to {weight:g}"
    for token in dict.fromkeys(token for text in chunks for token in text.embeddings):
        yield "prompt", f"the embedding {format_value(token)}"
    for prompt in params.image_prompts:
        if prompt.scale > 1:
            yield "ip_adapters", f"the IP-Adapter {format_value(prompt.name)} with scale {prompt.scale:g}"
    if check == LATENTS:
        for control in params.controls:
            if control.scale > 1:
                yield "controls", f"the ControlNet {format_value(control.name)} with scale {control.scale:g}"
        if params.guidance_scale > _LARGEST_GUIDANCE:
            yield "guidance_scale", f"guidance_scale {params.guidance_scale:g}"
