"""The description of a deployment: what `describe` of a request returns, for clients that offer choices."""

from collections.abc import Sequence
from typing import Literal

from typing_extensions import TypedDict  # pydantic, in the gateway, needs it for nested ones

from model.denoising.sampler_specs import HEUN, LCM, SPECS
from model.loading.served import ServedRelease, SizeRange, Sizes
from model.validation import (
    MAX_CONTROLS,
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_LORAS,
    MAX_MASKS,
    MAX_PROMPT_CHARACTERS,
    MAX_STEPS,
    Safety,
)


class DescribedAdapter(TypedDict):
    """An adapter that requests may name."""

    name: str
    bytes: int | None  # of its tensors; null: no request has named it yet
    used: float | None  # seconds since 1970 of the last request that named it; null: none since the server's start
    place: Literal["store", "host", "device"]  # the nearest place that has its tensors


class Description(TypedDict):
    """The body of the answer to `describe`. A size is {"sizes": [[width, height]]} or {"min", "max", "multiple"}."""

    status: Literal["success"]  # always "success"
    release: str  # model/version
    models: list[str]  # the releases that this deployment serves, by name; requests without `model` get the first
    target: str  # target key, for example cuda-h200-sm90-torch2.13-cu130
    runtime: str  # aot_inductor, tensorrt, tensorrt-rtx or eager
    device: str  # name of the GPU, or "CPU"
    native_size: list[int]  # width and height of a request that has none, in pixels
    sizes: dict[str, object]  # the served sizes, in pixels: a list `sizes`, or `min`, `max` and `multiple` of each side
    image_sizes: dict[str, object] | None  # those of requests with `image`; null: such requests are refused
    requires_masks: bool  # true: the model was trained for inpainting only
    has_refiner: bool  # true: `use_refiner` is accepted
    samplers: list[str]  # accepted values of `scheduler`
    forecasts: dict[str, list[str]]  # by sampler the accepted values of `forecast`
    safety: Safety  # what happens with images that the safety checker flags; with "blank" there are no previews
    loras: list[str]  # names of the adapters that this deployment offers now
    adapters: list[DescribedAdapter]  # the same adapters, in the same order
    controlnets: dict[str, int]  # by ControlNet the number of types of control images, 0 unless it is a Union network
    control_sizes: dict[str, dict[str, object]]  # by ControlNet the sizes at which it can be used
    ip_adapters: dict[str, int]  # by IP-Adapter the largest number of reference images
    ip_adapter_sizes: dict[str, object] | None  # the sizes at which IP-Adapters can be used; null without IP-Adapters
    defaults: dict[str, object]  # the release's defaults
    limits: dict[str, int]  # largest values of a request


def describe(release: ServedRelease, names: Sequence[str], adapters: Sequence[DescribedAdapter]) -> Description:
    """Return the description of a loaded release. `names`: of all releases. `adapters`: that requests may name."""
    served = release.served
    return {
        "status": "success",
        "release": release.release,
        "models": list(names),
        "target": release.target,
        "runtime": release.runtime,
        "device": release.device,
        "native_size": [served.native_width, served.native_height],
        "sizes": _sizes(served.sizes),
        "image_sizes": None if served.image_sizes is None else _sizes(served.image_sizes),
        "requires_masks": served.requires_masks,
        "has_refiner": served.has_refiner,
        "samplers": list(release.samplers),
        "forecasts": {name: ["off", *SPECS[name].forecasts] for name in release.samplers},
        "safety": served.safety,
        "loras": [adapter["name"] for adapter in adapters],
        "adapters": list(adapters),
        "controlnets": dict(served.controlnets),
        "control_sizes": {name: _sizes(sizes) for name, sizes in served.control_sizes.items()},
        "ip_adapters": {name: adapter.images for name, adapter in served.ip_adapters.items()},
        "ip_adapter_sizes": None if served.ip_adapter_sizes is None else _sizes(served.ip_adapter_sizes),
        "defaults": served.defaults.model_dump(),
        "limits": {
            "images": MAX_IMAGES,
            "steps": MAX_STEPS,
            "steps_lcm": LCM.max_steps,
            "steps_heun": HEUN.max_steps,
            "guidance": MAX_GUIDANCE,
            "prompt_characters": MAX_PROMPT_CHARACTERS,
            "masks": MAX_MASKS,
            "loras": MAX_LORAS,
            "controls": MAX_CONTROLS,
        },
    }


def _sizes(sizes: Sizes) -> dict[str, object]:
    if isinstance(sizes, SizeRange):
        return {"min": sizes.min_side, "max": sizes.max_side, "multiple": sizes.multiple}
    return {"sizes": [list(size) for size in sorted(sizes.sizes)]}
