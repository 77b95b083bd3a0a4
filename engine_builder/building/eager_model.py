"""A whole model in eager PyTorch, with the server's pipeline around it: what engines are compared with."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine_builder.building.eager_engine import EagerEngine
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_model_facts, read_noise_schedules, read_tokenizers
from engine_builder.networks.controlnet import components_of_controlnets
from engine_builder.networks.ip_adapter import components_of_ip_adapters
from engine_builder.networks.network import ModuleReader, Network, load_network
from model.api.resolve import resolve
from model.engines.engine import EngineSet
from model.images.pixels import Pixels
from model.loading.served import ServedModel, SizeRange, read_defaults
from model.pipeline.components import FAMILIES, find_component
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Control, GenerationParams, ImagePrompt
from model.pipeline.spec import model_parts
from model.pipeline.text_to_image import generate
from model.prompts.tokenizer import ClipTokenizer
from model.request_fields import GenerationRequest
from model.store.precision import Precision


def open_eager_model(
    engines: Mapping[str, EagerEngine],
    base: Checkpoint,
    refiner: Checkpoint | None,
    tokenizers: Mapping[str, ClipTokenizer],
    device: str,
) -> LoadedModel:
    """Return a model of engines in eager PyTorch, by component, with the settings of its checkpoints."""
    return LoadedModel(
        engines={name: EngineSet([engine]) for name, engine in engines.items()},
        tokenizers=dict(tokenizers),
        noise_schedules=dict(read_noise_schedules(base, refiner)),
        settings=read_model_facts(base, refiner),
        device=torch.device(device),
        family=FAMILIES[base.family],
    )


def load_eager_model(
    base: Checkpoint, refiner: Checkpoint | None, precision: Precision, device: str
) -> tuple[dict[str, Network], LoadedModel]:
    """Return the networks of a checkpoint in their plain form, and a model that runs them. Raises CheckpointError.

    In the plain form every linear and convolution is a module with the names of its weights.
    """
    reader = ModuleReader()
    networks = {}
    names = [spec.name for spec in FAMILIES[base.family].specs(*model_parts(refiner is not None))]
    for name in (*names, *components_of_controlnets(base), *components_of_ip_adapters(base)):
        checkpoint = base if find_component(name).part == "base" else refiner
        assert checkpoint is not None
        networks[name] = load_network(checkpoint, name, precision, device, reader, plain=True, text_chunks=None)
    return networks, open_eager_model(eager_engines(networks), base, refiner, read_tokenizers(base), device)


def eager_engines(networks: Mapping[str, Network], recording: bool = False) -> dict[str, EagerEngine]:
    """Return an engine for each network. `recording`: each engine copies its inputs."""
    return {name: EagerEngine(name, network.module, network.signature, recording) for name, network in networks.items()}


def generate_eagerly(
    model: LoadedModel,
    request: GenerationRequest,
    controls: tuple[Control, ...] = (),
    image_prompts: tuple[ImagePrompt, ...] = (),
) -> list[Pixels]:
    """Return the images of a request with an explicit width and height, which may be any. Raises BrokenImage.

    `controls`, `image_prompts`: its uses of ControlNets and IP-Adapters.
    """
    params = replace(resolve_for(model, request), controls=controls, image_prompts=image_prompts)
    return generate(model, [params])[0]


def resolve_for(model: LoadedModel, request: GenerationRequest) -> GenerationParams:
    """Return the parameters of a request with an explicit width and height, which may be any."""
    assert request.width is not None and request.height is not None
    served = ServedModel(
        native_width=request.width,
        native_height=request.height,
        sizes=SizeRange(1, 2**16, 1),
        has_refiner=model.settings.refiner is not None,
        defaults=read_defaults({}),
    )
    return resolve(request, served)
