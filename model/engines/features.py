"""The features of a denoiser's engines, in one table: the inputs of an engine in addition to latents, times and text.

The steps of an image need features, and an engine serves the images whose features it has. The inputs of a feature that
an image does not use are zeros. Imports neither torch nor numpy: a release is selected before they are imported.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

from model.engines import signatures
from model.engines.signatures import UnetWidths
from model.store.manifest import Signature, TensorSpec
from model.store.precision import Dtype

IMAGE_PROMPT, CONTROL, LORA, GUIDED_ZEROS = "image_prompt", "control", "lora", "guided_zeros"


@dataclass(frozen=True)
class Input:
    """An input of a network that runs in a step.

    name: in a signature; "residual_*" stands for all inputs with this beginning.
    scope: an image has one value, or one for each text (half of guidance).
    by_step: it has an entry for each step.
    repeats: it has an entry for each token of the text, see `model.denoising.inputs.repeat_tokens`.
    added: it is the sum of the outputs of the networks before the denoiser that have its name.
    """

    name: str
    scope: Literal["text", "image"] = "text"
    by_step: bool = False
    repeats: bool = False
    added: bool = False

    def matches(self, name: str) -> bool:
        """True for the name of this input in a signature."""
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    inputs: in the order of a signature. specs: the same for the widths of a UNet. A feature without inputs is a rule of
        the calls of its engines.
    paired: the entries of a call are conditional and then, for the same images, unconditional.
    adapts: its engines take adapters. They are loaded only if a deployment serves adapters, and are never quantized.
    """

    name: str
    inputs: tuple[Input, ...] = ()
    specs: Callable[[UnetWidths, Dtype], tuple[TensorSpec, ...]] = lambda widths, dtype: ()
    paired: bool = False
    adapts: bool = False


TEXT_INPUTS = (Input("time_embeds", by_step=True), Input(signatures.KEYS_VALUES, repeats=True))
FEATURES = {
    feature.name: feature
    for feature in (
        Feature(
            IMAGE_PROMPT,
            (Input(signatures.IMAGE_KEYS), Input(signatures.IMAGE_VALUES), Input(signatures.IMAGE_BIAS)),
            signatures.image_prompt_inputs,
        ),
        Feature(CONTROL, (Input("residual_*", added=True),), signatures.residual_inputs),
        Feature(
            LORA,
            (Input(signatures.LORA_DOWN, "image"), Input(signatures.LORA_UP, "image")),
            signatures.low_rank_inputs,
            adapts=True,
        ),
        Feature(GUIDED_ZEROS, paired=True),
    )
}
"""By name. Inputs have this order in a signature, so it is part of engine keys."""


CONTROLNET_INPUTS = (
    *TEXT_INPUTS,
    Input(signatures.CONTROL, "image"),
    Input(signatures.CONTROL_SCALE, "image", by_step=True),
)
"""Inputs of a network whose outputs are added to the inputs of the feature "control"."""


def denoiser_signature(widths: UnetWidths, dtype: Dtype, features: Collection[str] = ()) -> Signature:
    """Return what a UNet with these features takes and returns."""
    plain = signatures.unet_signature(widths, dtype)
    more = [spec for name, feature in FEATURES.items() if name in features for spec in feature.specs(widths, dtype)]
    return Signature(inputs=(*plain.inputs, *more), outputs=plain.outputs)


def denoiser_inputs() -> tuple[Input, ...]:
    """Return the inputs that a denoiser may have in addition to its latents."""
    return (*TEXT_INPUTS, *(one for feature in FEATURES.values() for one in feature.inputs))


class EngineName(NamedTuple):
    """The facts in the name of an engine in a manifest. bands: parts of an image, each on a separate GPU."""

    component: str
    features: frozenset[str] = frozenset()
    bands: int = 1


_OLDER_NAMES = {
    "unet_guided": EngineName("unet", frozenset({GUIDED_ZEROS})),
    "unet_controlled": EngineName("unet", frozenset({CONTROL})),
    "unet_ip": EngineName("unet", frozenset({IMAGE_PROMPT})),
    "unet_lora": EngineName("unet", frozenset({LORA})),
    "unet_lora_guided": EngineName("unet", frozenset({LORA, GUIDED_ZEROS})),
}
"""Names in existing releases, which stay readable. `unet_ip` may also take residuals, which its signature states."""
_NAMES = {engine: name for name, engine in _OLDER_NAMES.items()} | {
    EngineName("unet", frozenset({IMAGE_PROMPT, CONTROL})): "unet_ip"
}
_BANDS = re.compile(r"(\w*unet)_([0-9]+)_bands")


def parse_name(name: str) -> EngineName:
    """Return the facts in an engine's name in a manifest: "unet.control.lora" is the UNet with these two features."""
    if name in _OLDER_NAMES:
        return _OLDER_NAMES[name]
    if bands := _BANDS.fullmatch(name):
        return EngineName(bands[1], bands=int(bands[2]))
    component, *features = name.split(".")
    if features and component.endswith("unet") and FEATURES.keys() >= set(features):
        return EngineName(component, frozenset(features))
    return EngineName(name)


def has(features: Collection[str], rule: Literal["paired", "adapts"]) -> bool:
    """True if one of the features has a rule."""
    return any(getattr(FEATURES[name], rule) for name in features)


def engine_name(component: str, features: Collection[str] = (), bands: int = 1) -> str:
    """Return the name of an engine in a manifest. See `parse_name`; `unet_ip` may have two sets of features."""
    if bands > 1:
        return f"{component}_{bands}_bands"
    parts = [component, *(name for name in FEATURES if name in features)]
    return _NAMES.get(EngineName(component, frozenset(features)), ".".join(parts))


def feature_sets() -> list[frozenset[str]]:
    """Return all sets of features, the empty one included."""
    return [frozenset(some) for count in range(len(FEATURES) + 1) for some in combinations(FEATURES, count)]


def features_of(name: str, signature: Signature) -> frozenset[str]:
    """Return the features of an engine: features whose inputs its signature has, and rules that its name states."""
    inputs = [spec.name for spec in signature.inputs]
    taken = (
        feature.name
        for feature in FEATURES.values()
        if any(one.matches(given) for one in feature.inputs for given in inputs)
    )
    return frozenset(taken) | {one for one in parse_name(name).features if FEATURES[one].paired}
