"""The components of all families, by their names in a manifest. Imports no torch."""

from collections.abc import Container

from model.pipeline.families import sd, sdxl
from model.pipeline.spec import LOW_RANK, SAFETY, Components, ComponentSpec, Family, Variant, added_component
from model.store.manifest import Family as FamilyName

FAMILIES: dict[FamilyName, Family] = {"sdxl": sdxl.FAMILY, "sd": sd.FAMILY}
COMPONENTS: Components = sdxl.FAMILY.components | sd.FAMILY.components | LOW_RANK | SAFETY
"""The components of all families. A name means the same network in each of them."""


def find_component(name: str) -> tuple[ComponentSpec, Variant | None]:
    """Return the component that has this name in a manifest, or whose variant has it, and that variant."""
    for spec in COMPONENTS.values():
        for variant in spec.variants:
            if variant.name == name:
                return spec, variant
    return added_component(name) or COMPONENTS[name], None


def unets() -> tuple[ComponentSpec, ...]:
    """Return the UNets, without those that replace one of them for images with adapters."""
    return tuple(spec for spec in loop_unets() if not spec.low_rank_of)


def loop_unets(components: Components = COMPONENTS) -> tuple[ComponentSpec, ...]:
    """Return the components that denoising loops run."""
    return tuple(spec for spec in components.values() if spec.phase == "step" and not spec.feeds)


def step_components(
    unet: str, available: Container[str], components: Components = COMPONENTS
) -> tuple[tuple[ComponentSpec, ...], list[str]]:
    """Return the `available` components that run in each step of a UNet, and the names of inputs that differ by step.

    The components are in the order in which they run, the UNet last.
    """
    before = (spec for spec in components.values() if spec.feeds == unet and spec.name in available)
    specs = (*before, components[unet])
    return specs, [name for spec in specs for name in spec.by_step]
