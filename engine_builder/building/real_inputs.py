"""Record each network's inputs while images are generated. Engines are compared with eager PyTorch on these inputs."""

from collections.abc import Collection

import numpy as np
import torch
from PIL import Image

from engine_builder.building.eager_model import eager_engines, generate_eagerly, open_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_tokenizers
from engine_builder.networks.network import Network
from model.denoising.buffers import SAMPLE
from model.engines.features import FEATURES, engine_name, has, parse_name
from model.engines.shapes import bind_shapes
from model.engines.signatures import control_types
from model.images.fit import reference_square
from model.images.pixels import Pixels
from model.pipeline.components import find_component
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Control, ImagePrompt
from model.pipeline.spec import CONTROLNET_TIME, IMAGE_ENCODER, controlnets_of, ip_adapters_of
from model.pipeline.vae import encode_pixels, to_pixels
from model.request_fields import GenerationRequest
from model.store.manifest import Bucket, Signature

_PROMPT = "a large red circle on a blue background"
_MAX_DEFAULT_SIDE = 512  # pixels; without this limit a CPU build of a full-size SDXL takes an hour

Inputs = dict[str, torch.Tensor]
"""The inputs of one call of a network, by name."""


def record_real_inputs(
    networks: dict[str, Network],
    base: Checkpoint,
    refiner: Checkpoint | None,
    device: str,
    sizes: Collection[tuple[int, int]],
) -> dict[str, list[Inputs]]:
    """Generate an image of each size in eager PyTorch, with the refiner, and return each component's inputs.

    `sizes`: (height, width) in pixels; if empty, the native size, or a smaller one. Raises BrokenImage if an image
    holds NaN or infinity.
    """
    eager = eager_engines({name: net for name, net in networks.items() if _plain(name) == name}, recording=True)
    model = open_eager_model(eager, base, refiner, read_tokenizers(base), device)
    facts = model.settings
    native = (min(facts.native_height, _MAX_DEFAULT_SIDE), min(facts.native_width, _MAX_DEFAULT_SIDE))
    for height, width in sorted(sizes or [native]):
        request = GenerationRequest(
            prompt=_PROMPT, negative_prompt="", width=width, height=height, num_inference_steps=4, seed=0,
            use_refiner=facts.refiner is not None, denoising_frac=0.5,
        )  # fmt: skip
        [pixels] = generate_eagerly(model, request)
        encode_pixels(model, to_pixels(torch.from_numpy(pixels).to(device)))
        controls = tuple(_control(model, name, pixels) for name in controlnets_of(networks))
        if controls:
            generate_eagerly(model, request, controls)
        for name in ip_adapters_of(networks):  # with the ControlNets, so that no input of such a UNet is only zeros
            generate_eagerly(model, request, controls, (_image_prompt(model, name, pixels),))
    # The request has a negative prompt, so it does not use the paired variants: they get their component's inputs.
    recorded = {name: eager[_plain(name)].recorded_inputs for name in networks}
    for name, network in networks.items():
        if has(find_component(name).features, "adapts"):  # with adapters of any kind: no request of a build has one
            recorded[name] = [_with_random_factors(network.signature, inputs) for inputs in recorded[name]]
    return recorded


def _plain(name: str) -> str:
    """Return the component whose inputs a variant for bands, adapters or guidance against zeros gets.

    That component may take more inputs, see `engine_name`.
    """
    component, features, _ = parse_name(name)
    recorded = {one for one in features if not (FEATURES[one].paired or FEATURES[one].adapts)}
    return engine_name(component, recorded)


def _with_random_factors(signature: Signature, inputs: Inputs) -> Inputs:
    """Return the inputs that a UNet takes, with random low-rank factors. Zeros would not use a UNet's low-rank part."""
    sample = inputs[SAMPLE]
    return {
        spec.name: inputs[spec.name]
        if spec.name in inputs
        else 0.02 * torch.randn(len(sample), int(spec.shape[1]), dtype=sample.dtype, device=sample.device)
        for spec in signature.inputs
    }


def _control(model: LoadedModel, controlnet: str, pixels: Pixels) -> Control:
    """Return a ControlNet's use in every step, with the generated image as the control image."""
    types = control_types(model.engines[f"{CONTROLNET_TIME}.{controlnet}"].signature)
    return Control(controlnet, pixels, scale=1.0, start=0.0, end=1.0, mode=0 if types else None)


def _image_prompt(model: LoadedModel, adapter: str, pixels: Pixels) -> ImagePrompt:
    """Return an IP-Adapter's use, with the generated image as the reference image."""
    [spec] = model.engines[f"{IMAGE_ENCODER}.{adapter}"].signature.inputs
    return ImagePrompt(adapter, np.stack([reference_square(Image.fromarray(pixels), int(spec.shape[2]))]), scale=1.0)


def fit_to_bucket(real_inputs: list[Inputs], network: Network, bucket: Bucket) -> list[Inputs]:
    """Return the inputs of the bucket's size, with batch entries repeated or dropped to fit its batch."""
    fitted = []
    for inputs in real_inputs:
        sizes = bind_shapes(network.signature, inputs, network.component)
        batch, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if bucket.holds(bucket.batch.min, height, width):
            index = torch.arange(min(max(batch, bucket.batch.min), bucket.batch.max)) % batch
            fitted.append({name: tensor[index.to(tensor.device)] for name, tensor in inputs.items()})
    return fitted
