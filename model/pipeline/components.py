"""The components of all families, by their names in a manifest. Imports no torch."""

from collections.abc import Collection, Container
from dataclasses import replace

from model.pipeline.families import sd, sdxl
from model.pipeline.spec import (
    ADDED_COMPONENTS,
    CONTROLNET,
    CONTROLNET_IMAGE,
    CONTROLNET_TEXT,
    CONTROLNET_TIME,
    IMAGE_ENCODER,
    IP_ADAPTER,
    LOW_RANK,
    SAFETY,
    UNET_CONTROLLED,
    UNET_IP,
    Components,
    ComponentSpec,
    Family,
    Variant,
)
from model.store.manifest import Family as FamilyName

FAMILIES: dict[FamilyName, Family] = {"sdxl": sdxl.FAMILY, "sd": sd.FAMILY}
COMPONENTS: Components = sdxl.FAMILY.components | sd.FAMILY.components | LOW_RANK | SAFETY
"""The components of all families. A name means the same network in each of them."""


def find_component(name: str, components: Components = COMPONENTS) -> tuple[ComponentSpec, Variant | None]:
    """Return the component that has this name in a manifest, or whose variant has it, and that variant."""
    for spec in components.values():
        for variant in spec.variants:
            if variant.name == name:
                return spec, variant
    kind, _, own_name = name.partition(".")
    if kind in ADDED_COMPONENTS:
        spec = ADDED_COMPONENTS[kind]
        folder = f"{spec.checkpoint_folder}.{own_name}"
        return (replace(spec, name=name, checkpoint_folder=folder) if own_name else spec), None
    return components[name], None


def control_components(controlnets: Collection[str]) -> tuple[ComponentSpec, ...]:
    """Return the components that a build with these ControlNets may add, in the order in which they are built."""
    if not controlnets:
        return ()
    kinds = (CONTROLNET_TEXT, CONTROLNET_TIME, CONTROLNET_IMAGE, CONTROLNET)
    names = [UNET_CONTROLLED, *(f"{kind}.{controlnet}" for controlnet in controlnets for kind in kinds)]
    return tuple(find_component(name)[0] for name in names)


def ip_components(adapters: Collection[str]) -> tuple[ComponentSpec, ...]:
    """Return the components that a build with these IP-Adapters adds, in the order in which they are built."""
    if not adapters:
        return ()
    names = [UNET_IP, *(f"{kind}.{adapter}" for adapter in adapters for kind in (IMAGE_ENCODER, IP_ADAPTER))]
    return tuple(find_component(name)[0] for name in names)


def unets(components: Components = COMPONENTS) -> tuple[ComponentSpec, ...]:
    """Return the UNets, without those that replace one of them for images with adapters."""
    return tuple(spec for spec in loop_unets(components) if not spec.low_rank_of)


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
