"""Compare each network of a build with the library's own module: diffusers' or transformers', on random inputs.

Both have the same weights, in which adapters are merged if the plan says so, and compute in float32. A wrapper that
ignores an entry of a config.json differs by far more than the limit, also where no test has such a model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine_builder.building.counterparts import Counterparts
from engine_builder.checkpoints.ip_adapter import open_adapter
from engine_builder.kernels.float_arithmetic import stored_types
from engine_builder.networks.text import FinalTextNetwork
from engine_builder.networks.unet import StepUnet
from model.adapters.changes import Change
from model.adapters.packing import pack
from model.engines import signatures
from model.engines.features import GUIDED_ZEROS, IMAGE_PROMPT
from model.engines.shapes import shape_at
from model.pipeline import spec as names
from model.pipeline.components import FAMILIES, find_component
from model.pipeline.image_prompt import MASKED
from model.pipeline.spec import Denoiser, Part
from model.prompts.tokenizer import ClipTokenizer
from model.prompts.weighted_prompt import plain_chunks

_BATCH = 2
_LATENT_SIDE = 16
_TIMESTEPS = (981.0, 12.0)
_TEXTS = ("a small orange star at the top on a purple background", "a portrait, " * 40)
_RESIDUAL_DEVIATION = 0.1  # of what a ControlNet adds; large residuals would hide the UNet's own result
_ADAPTER_SCALE = 0.1  # of what an adapter adds to a linear's outputs, for inputs of deviation 1

Outputs = Iterator[tuple[str, Sequence[Tensor], Sequence[Tensor]]]
"""Each component with its outputs and the library's."""
Comparison = Callable[[], list[tuple[str, Sequence[Tensor], Sequence[Tensor]]]]


def comparisons(pair: Counterparts, tokenizers: dict[str, ClipTokenizer]) -> Iterator[tuple[str, Comparison]]:
    """Yield the comparisons of all networks of a plan, each with the name of what it compares."""
    plan = pair.plan
    for denoiser in FAMILIES[plan.base.family].denoisers:
        if denoiser.part == "refiner" and plan.refiner is None:
            continue
        for component, tokenizer in denoiser.text_encoders:
            yield component, _bind(_text_encoder, pair, component, tokenizers[tokenizer])
        yield denoiser.unet, _bind(_unets, pair, denoiser)
    yield "vae", _bind(_vae, pair)
    for name in names.controlnets_of(plan.components):
        yield f"{names.CONTROLNET}.{name}", _bind(_controlnet, pair, name)
    if adapters := names.ip_adapters_of(plan.components):
        yield names.IP_UNET, _bind(_ip_adapters, pair, adapters)
    if names.SAFETY_CHECKER in plan.components:
        yield names.SAFETY_CHECKER, _bind(_safety_checker, pair)


def _bind(compare: Callable[..., Outputs], *arguments: Any) -> Comparison:
    return lambda: list(compare(*arguments))


def _text_encoder(pair: Counterparts, component: str, tokenizer: ClipTokenizer) -> Outputs:
    """Compare the hidden states of the last layer that a UNet reads, and of the one before."""
    library = pair.library(component)
    ids = torch.tensor([plain_chunks(tokenizer, text).ids[0] for text in _TEXTS], device=pair.device)
    output = library(ids, output_hidden_states=True, return_dict=True)
    columns = signatures.clip_skip_columns(pair.ours(component).signature)
    skips = [0, min(1, columns - 1)]
    clip_skip = torch.nn.functional.one_hot(torch.tensor(skips), columns).to(pair.device)
    ours = pair.run(component, input_ids=ids, clip_skip=clip_skip)
    if isinstance(pair.ours(component).module, FinalTextNetwork):
        states = [library.final_layer_norm(output.hidden_states[-1 - skip][row]) for row, skip in enumerate(skips)]
        states[0] = output.last_hidden_state[0]
    else:
        states = [output.hidden_states[-2 - skip][row] for row, skip in enumerate(skips)]
    pooled = [output.text_embeds] if "pooled" in ours else []
    yield component, list(ours.values()), [torch.stack(states), *pooled]


@dataclass(frozen=True)
class _Step:
    """The inputs of a UNet or ControlNet: latents, timesteps, text, and what SDXL's UNets add to the timestep."""

    sample: Tensor
    timestep: Tensor
    text: Tensor
    added: dict[str, Any]
    timestep_cond: Tensor | None

    @property
    def time_inputs(self) -> dict[str, Tensor]:
        """The inputs of a time network."""
        cond = {} if self.timestep_cond is None else {signatures.TIMESTEP_COND: self.timestep_cond}
        return {"timestep": self.timestep, **self.added, **cond}

    @property
    def library_inputs(self) -> dict[str, Any]:
        """The same inputs for a module of diffusers."""
        inputs: dict[str, Any] = {
            "sample": self.sample, "timestep": self.timestep, "encoder_hidden_states": self.text,
            "added_cond_kwargs": dict(self.added), "return_dict": False,
        }  # fmt: skip
        return inputs if self.timestep_cond is None else inputs | {"timestep_cond": self.timestep_cond}


def _random_step(pair: Counterparts, part: Part, channels: int, multiple: int) -> _Step:
    """Draw the inputs of a step. `multiple`: a latent's side is one of it."""
    checkpoint = pair.plan.base if part == "base" else pair.plan.refiner
    assert checkpoint is not None
    widths = checkpoint.unet_widths()
    draw = _drawing(pair.device)
    side = -(-_LATENT_SIDE // multiple) * multiple
    added = {}
    if widths.pooled_width:
        sizes = torch.randint(0, 1024, (_BATCH, widths.time_ids), generator=torch.Generator().manual_seed(1))
        pooled = draw(_BATCH, widths.pooled_width)
        added = FAMILIES[checkpoint.family].time_inputs(pooled, sizes.float().to(pair.device))
    return _Step(
        draw(_BATCH, channels, side, side),
        torch.tensor(_TIMESTEPS, device=pair.device),
        draw(_BATCH, widths.tokens, widths.context_width),
        added,
        draw(_BATCH, widths.timestep_cond) if widths.timestep_cond else None,
    )


def _drawing(device: str, seed: int = 0) -> Callable[..., Tensor]:
    """Return a function that draws float32 numbers from N(0, 1), the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


def _unets(pair: Counterparts, denoiser: Denoiser) -> Outputs:
    """Compare a UNet and its variants, each together with the networks for text and timesteps."""
    part, unet = denoiser.part, pair.library(denoiser.unet)
    components = [name for name in pair.plan.components if _is_unet(name, part)]
    multiple = max(find_component(name).bands for name in components) * 2 ** (len(unet.config.block_out_channels) - 1)
    step = _random_step(pair, part, unet.config.in_channels, multiple)
    time_embeds = pair.run(denoiser.time, **step.time_inputs)["time_embeds"]
    keys_values = pair.run(denoiser.text, encoder_hidden_states=step.text)[signatures.KEYS_VALUES]
    inputs = {"sample": step.sample, "time_embeds": time_embeds, signatures.KEYS_VALUES: keys_values}
    # Guidance against zeros: both halves have the first latents, and the second half attends to zeros.
    halves = replace(
        step,
        sample=step.sample[:1].expand_as(step.sample).contiguous(),
        text=torch.cat([step.text[:1], torch.zeros_like(step.text[:1])]),
    )
    for component in components:
        if GUIDED_ZEROS in find_component(component).features:
            yield component, *_run_both(pair, component, unet, halves, inputs | {"sample": halves.sample})
        else:
            yield component, *_run_both(pair, component, unet, step, inputs)


def _is_unet(component: str, part: Part) -> bool:
    """True for a UNet of a step, except one for reference images, which is compared with its IP-Adapters."""
    spec = find_component(component)
    return spec.is_denoiser and spec.part == part and IMAGE_PROMPT not in spec.features


def _run_both(
    pair: Counterparts, component: str, unet: nn.Module, step: _Step, inputs: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a UNet with these inputs and random ones of ControlNets and adapters, and the library's with the same.

    Its other inputs are zeros: an image that does not use a feature has zeros, and the result of a plain UNet.
    """
    signature, scale = pair.ours(component).signature, pair.plan.base.vae_widths().scale
    height, width = (side * scale for side in step.sample.shape[2:])
    sizes = {"rows": _BATCH, "height": height, "width": width}
    shapes = {spec.name: shape_at(spec.shape, sizes) for spec in signature.inputs if spec.name not in inputs}
    zeros = {name: torch.zeros(shape, device=pair.device) for name, shape in shapes.items()}
    draw, of_library = _drawing(pair.device, seed=2), step.library_inputs
    names_of_residuals = [spec.name for spec in signatures.residuals_of(signature)]
    residuals = {name: _RESIDUAL_DEVIATION * draw(*shapes[name]) for name in names_of_residuals}
    if residuals:
        *down, middle = residuals.values()
        of_library |= {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
    with _adapted(pair, component, unet) as vectors:
        expected = unet(**of_library)
    return list(pair.run(component, **zeros | inputs | residuals | vectors).values()), list(expected)


@contextmanager
def _adapted(pair: Counterparts, component: str, unet: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Add random adapters to the linears of the library's UNet. Yields the inputs that make the same changes.

    They are empty for a component without low-rank inputs.
    """
    module = pair.ours(component).module
    if not isinstance(module, StepUnet) or module.low_rank is None:
        yield {}
        return
    packing, guided = module.low_rank.packing, GUIDED_ZEROS in module.features
    draw = _drawing(pair.device, seed=3)
    adapters = [
        {
            place.layer.name: Change(
                "matrix",
                {
                    "down": draw(packing.rank, place.layer.shape[1]) * place.layer.shape[1] ** -0.5,
                    "up": draw(place.layer.shape[0], packing.rank) * packing.rank**-0.5,
                },
                _ADAPTER_SCALE,
            )
            for place in packing.layers
        }
        for _ in range(1 if guided else _BATCH)  # both halves of guidance have one image's adapters
    ]
    packed = [pack(packing, [(changes, 1.0)], torch.float32) for changes in adapters] * (_BATCH // len(adapters))
    vectors = {name: torch.cat([one[name] for one in packed]) for name in packed[0]}
    with ExitStack() as hooks:
        for place in packing.layers:
            linear = unet.get_submodule(place.layer.name.removeprefix(f"{names.UNET}."))
            changes = [adapters[row % len(adapters)][place.layer.name] for row in range(_BATCH)]
            hooks.callback(linear.register_forward_hook(_adding(changes)).remove)
        yield vectors


def _adding(changes: Sequence[Change]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that adds each batch entry's change to the output of a linear, or of a 1x1 convolution."""

    def add(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs = arguments[0]
        is_image = inputs.ndim == 4
        tokens = inputs.flatten(2).transpose(1, 2) if is_image else inputs  # [batch, tokens, in]
        parts = [(change.parts["down"].T, change.parts["up"].T * change.scale) for change in changes]
        added = torch.stack([(one @ down) @ up for one, (down, up) in zip(tokens, parts, strict=True)])
        return output + (added.transpose(1, 2).reshape(output.shape) if is_image else added)

    return add


def _vae(pair: Counterparts) -> Outputs:
    widths, draw = pair.plan.base.vae_widths(), _drawing(pair.device)
    vae = pair.library(names.VAE_DECODER)
    latents = draw(_BATCH, widths.latent_channels, _LATENT_SIDE, _LATENT_SIDE)
    pixels = draw(_BATCH, 3, _LATENT_SIDE * widths.scale, _LATENT_SIDE * widths.scale).clamp(-1, 1)
    decoded = pair.run(names.VAE_DECODER, latents=latents)
    yield names.VAE_DECODER, list(decoded.values()), [vae.decode(latents).sample]
    encoded = pair.run(names.VAE_ENCODER, pixels=pixels)
    yield names.VAE_ENCODER, list(encoded.values()), [vae.encode(pixels).latent_dist.parameters]


def _controlnet(pair: Counterparts, name: str) -> Outputs:
    """Compare the networks of a ControlNet together."""
    component = f"{names.CONTROLNET}.{name}"
    network, scale = pair.library(component), 0.7
    step = _random_step(pair, "base", network.config.in_channels, 2 ** (len(network.config.block_out_channels) - 1))
    step = replace(step, timestep_cond=None)
    side = step.sample.shape[-1] * pair.plan.base.vae_widths().scale
    # One control image for both entries: a Union network mixes the images of a batch, and a request has one.
    pixels = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(4)).to(pair.device)
    types = signatures.control_types(pair.ours(f"{names.CONTROLNET_TIME}.{name}").signature)
    of_type: dict[str, Tensor] = {}
    library_inputs: dict[str, Any] = {"controlnet_cond": pixels.expand(_BATCH, -1, -1, -1)}
    if types:
        control_type = torch.nn.functional.one_hot(torch.tensor([types - 1]), types).float().to(pair.device)
        of_type = {signatures.CONTROL_TYPE: control_type.expand(_BATCH, -1)}
        library_inputs = {
            "controlnet_cond": [library_inputs["controlnet_cond"]],
            "control_type": of_type[signatures.CONTROL_TYPE], "control_type_idx": [types - 1],
        }  # fmt: skip
    down, middle = network(**step.library_inputs, **library_inputs, conditioning_scale=scale)
    time_embeds = pair.run(f"{names.CONTROLNET_TIME}.{name}", **step.time_inputs, **of_type)["time_embeds"]
    inputs = {"sample": step.sample, "time_embeds": time_embeds}
    image = pair.run(
        f"{names.CONTROLNET_IMAGE}.{name}", pixels=pixels, **{key: value[:1] for key, value in of_type.items()}
    )
    inputs |= {
        signatures.CONTROL: image[signatures.CONTROL].expand(_BATCH, -1, -1, -1),
        signatures.CONTROL_SCALE: torch.full((_BATCH, 1), scale, device=pair.device),
    }
    if (text := f"{names.CONTROLNET_TEXT}.{name}") in pair.plan.components:
        inputs |= pair.run(text, encoder_hidden_states=step.text)
    yield component, list(pair.run(component, **inputs).values()), [*down, middle]


def _ip_adapters(pair: Counterparts, adapters: Sequence[str]) -> Outputs:
    """Compare each image encoder, and the UNets for reference images with each adapter."""
    components = [name for name in pair.plan.components if IMAGE_PROMPT in find_component(name).features]
    slots, slot_tokens = signatures.image_slots(pair.ours(names.IP_UNET).signature)
    draw, unet = _drawing(pair.device, seed=5), pair.plan.base.config("unet")
    step = _random_step(pair, "base", unet["in_channels"], 8)
    base = FAMILIES[pair.plan.base.family].base
    time_embeds = pair.run(base.time, **step.time_inputs)["time_embeds"]
    keys_values = pair.run(base.text, encoder_hidden_states=step.text)[signatures.KEYS_VALUES]
    for name in adapters:
        encoder, files = f"{names.IMAGE_ENCODER}.{name}", pair.plan.base.ip_adapter(name)
        side = int(pair.ours(encoder).signature.inputs[0].shape[2])
        pixels = draw(_BATCH, 3, side, side)
        features = pair.run(encoder, pixels=pixels)[signatures.IMAGE_FEATURES]
        output = pair.library(encoder)(pixels, output_hidden_states=True, return_dict=True)
        of_library = output.image_embeds if open_adapter(files).reads_embedding else output.hidden_states[-2]
        yield encoder, [features], [of_library]
        # The adapter alone, in the first slot.
        image = pair.run(f"{names.IP_ADAPTER}.{name}", features=features)
        images = {
            key: torch.zeros(_BATCH, slots, slot_tokens, value.shape[-1], device=pair.device)
            for key, value in image.items()
        }
        count = image[signatures.IMAGE_KEYS].shape[1]
        for key, value in image.items():
            images[key][:, 0, :count] = value
        bias = torch.zeros(_BATCH, slots, slot_tokens, device=pair.device)
        bias[:, 0, count:] = MASKED
        inputs = {"sample": step.sample, "time_embeds": time_embeds, signatures.KEYS_VALUES: keys_values}
        inputs |= images | {signatures.IMAGE_BIAS: bias}
        unet = pair.library(names.IP_UNET)
        with stored_types(), open_adapter(files).tensors() as tensors:
            unet._load_ip_adapter_weights([_by_part(tensors)], low_cpu_mem_usage=False)
        with_image = replace(step, added=step.added | {"image_embeds": [of_library[:, None]]})
        for component in components:
            yield f"{component} with {name}", *_run_both(pair, component, unet, with_image, inputs)


def _by_part(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of an IP-Adapter's file by their part, as diffusers reads them."""
    parts: dict[str, dict[str, Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    return parts


def _safety_checker(pair: Counterparts) -> Outputs:
    """Compare the scores of the concepts, of which the library returns only a decision."""
    from diffusers.pipelines.stable_diffusion.safety_checker import cosine_distance

    checker = pair.library(names.SAFETY_CHECKER)
    side = int(pair.ours(names.SAFETY_CHECKER).signature.inputs[0].shape[2])
    pixels = _drawing(pair.device)(_BATCH, 3, side, side)
    embeds = checker.visual_projection(checker.vision_model(pixels)[1])
    scores = [
        cosine_distance(embeds, concepts) - thresholds  # type: ignore[no-untyped-call]
        for concepts, thresholds in (
            (checker.special_care_embeds, checker.special_care_embeds_weights),
            (checker.concept_embeds, checker.concept_embeds_weights),
        )
    ]
    yield names.SAFETY_CHECKER, list(pair.run(names.SAFETY_CHECKER, pixel_values=pixels).values()), scores
