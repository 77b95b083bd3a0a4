"""The components of all families, by their names in a manifest. Imports no torch."""

from collections import ChainMap
from dataclasses import replace
from functools import partial

from model.engines.features import denoiser_signature, parse_name
from model.pipeline.families import sd, sdxl
from model.pipeline.spec import SAFETY, Components, ComponentSpec, Family, added_component
from model.store.manifest import Family as FamilyName

FAMILIES: dict[FamilyName, Family] = {"sdxl": sdxl.FAMILY, "sd": sd.FAMILY}
COMPONENTS: Components = ChainMap(SAFETY, sd.FAMILY.components, sdxl.FAMILY.components)
"""The components of all families, in the reverse order of these tables, whose changes it follows.

A name means the same network in each of them.
"""


def find_component(name: str) -> ComponentSpec:
    """Return the component that has this name in a manifest, or the variant of a denoiser."""
    component, features, bands = parse_name(name)
    if component == name:
        return added_component(name) or COMPONENTS[name]
    signature = partial(denoiser_signature, features=features)
    return replace(COMPONENTS[component], name=name, signature=signature, features=features, bands=bands, optional=True)


def unets() -> tuple[ComponentSpec, ...]:
    """Return the UNets of all parts, which denoising loops run."""
    return tuple(spec for spec in COMPONENTS.values() if spec.is_denoiser)
