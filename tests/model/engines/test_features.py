"""Names of engines in manifests, and the features that follow from names and signatures."""

import itertools

from model.engines.features import (
    CONTROL,
    FEATURES,
    GUIDED_ZEROS,
    IMAGE_PROMPT,
    LORA,
    engine_name,
    features_of,
    parse_name,
)
from model.pipeline.components import COMPONENTS
from model.pipeline.spec import ADDED_COMPONENTS
from model.store.manifest import Signature, TensorSpec

SETS = [frozenset(some) for count in range(5) for some in itertools.combinations(FEATURES, count)]


def signature(*names: str) -> Signature:
    inputs = tuple(TensorSpec(name=name, dtype="float32", shape=("rows", 1)) for name in ("sample", *names))
    return Signature(inputs=inputs, outputs=(TensorSpec(name="noise", dtype="float32", shape=("rows", 1)),))


def test_a_name_says_component_features_and_bands() -> None:
    for component, features in itertools.product(("unet", "refiner_unet"), SETS):
        name = engine_name(component, features)
        if (component, features) != ("unet", {IMAGE_PROMPT, CONTROL}):  # as in releases: the signature tells
            assert parse_name(name) == (component, features, 1), name
    assert engine_name("unet", {LORA, CONTROL, IMAGE_PROMPT}) == "unet.image_prompt.control.lora"
    assert engine_name("unet", bands=4) == "unet_4_bands" and parse_name("unet_4_bands") == ("unet", frozenset(), 4)
    assert parse_name("controlnet.lora") == ("controlnet.lora", frozenset(), 1)
    assert parse_name("unet_unconditional").component not in {*COMPONENTS, *ADDED_COMPONENTS}


def test_features_follow_from_the_signature() -> None:
    images = ("image_keys", "image_values", "image_bias")
    assert features_of("unet_ip", signature(*images)) == {IMAGE_PROMPT}
    assert features_of("unet_ip", signature(*images, "residual_0", "residual_mid")) == {IMAGE_PROMPT, CONTROL}
    assert features_of("unet_lora_guided", signature("lora_down", "lora_up")) == {LORA, GUIDED_ZEROS}
    assert features_of("unet", signature("time_embeds", "keys_values")) == frozenset()
