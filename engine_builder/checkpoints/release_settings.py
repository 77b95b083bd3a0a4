"""Read a checkpoint's facts, noise schedules, request defaults and tokenizers for a release. Loads no weights."""

import math
from dataclasses import asdict
from typing import Any

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.scheduler_config import read_scheduler
from engine_builder.checkpoints.tokenizers import export_tokenizer
from engine_builder.stores.store import WritableStore
from model.denoising.edm_schedule import AnyNoiseSchedule, EdmSchedule
from model.denoising.samplers import sampler_schedule
from model.errors import ManifestError, RequestRefused
from model.loading.served import read_defaults
from model.pipeline.components import FAMILIES
from model.prompts.tokenizer import ClipTokenizer
from model.store.manifest import Blob, ModelFacts, RefinerFacts, TokenizerRecord
from model.validation import LARGEST_SIDE, SMALLEST_SIDE


def read_model_facts(base: Checkpoint, refiner: Checkpoint | None) -> ModelFacts:
    """Return the facts that the pipeline needs. Raises CheckpointError for a model that cannot be served."""
    widths, vae = base.vae_widths(), base.config("vae")
    family = base.family
    latents_mean, latents_std = _normalization(base, widths.latent_channels)
    # The configs of Stable Diffusion 1 and 2 are older than this entry.
    scaling = vae.get("scaling_factor", FAMILIES[family].vae_scaling) if family == "sd" else vae["scaling_factor"]
    if type(scaling) not in (int, float) or not 0 < scaling < math.inf:
        raise CheckpointError(
            f"{base.folder('vae')}/config.json: scaling_factor is {scaling!r}.",
            f"Set a positive number; that of a {FAMILIES[family].title} is {FAMILIES[family].vae_scaling}.",
        )
    for other in FAMILIES.values():
        if other.name != family and scaling == other.vae_scaling:
            raise CheckpointError(
                f"{base.folder('vae')} is that of a {other.title} (scaling_factor {scaling}), and the model "
                f"is a {FAMILIES[family].title}. Its UNet cannot use these latents.",
                "Use the VAE and the UNet of one model.",
            )
    native_height, native_width = _native_size(base, widths.scale)
    refiner_facts = None
    if refiner is not None:
        index = refiner.index
        refiner_facts = RefinerFacts(
            force_zeros_for_empty_prompt=index.get("force_zeros_for_empty_prompt", True),
            requires_aesthetics_score=index.get("requires_aesthetics_score", False),
        )
    return ModelFacts(
        native_height=native_height,
        native_width=native_width,
        vae_scale_factor=widths.scale,
        vae_scaling_factor=scaling,
        latent_channels=widths.latent_channels,
        latents_mean=latents_mean,
        latents_std=latents_std,
        force_zeros_for_empty_prompt=family == "sdxl" and base.index.get("force_zeros_for_empty_prompt", True),
        refiner=refiner_facts,
    )


def _normalization(base: Checkpoint, channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return the mean and the deviation of the VAE's latents by channel, None if diffusers does not apply them."""
    vae, names = base.config("vae"), ("latents_mean", "latents_std")
    values: list[Any] = [vae.get(name) for name in names]
    if values == [None, None]:
        return None, None
    if base.family == "sd":
        raise CheckpointError(
            f"{base.folder('vae')}/config.json: latents_mean and latents_std are set, and diffusers' pipelines of "
            f"{FAMILIES['sd'].title} ignore them.",
            "Set both to null, or use another VAE.",
        )
    for name, numbers in zip(names, values, strict=True):
        are_numbers = isinstance(numbers, list) and all(type(one) in (int, float) for one in numbers)
        if not are_numbers or len(numbers) != channels or not all(map(math.isfinite, numbers)):
            raise CheckpointError(
                f"{base.folder('vae')}/config.json: {name} is {numbers!r:.80}.",
                f"Set {channels} numbers in each of both.",
            )
    mean, deviation = (tuple(map(float, numbers)) for numbers in values)
    if min(deviation) <= 0:
        raise CheckpointError(
            f"{base.folder('vae')}/config.json: latents_std is {values[1]!r:.80}.", "Set positive numbers."
        )
    return mean, deviation


def _native_size(base: Checkpoint, vae_scale: int) -> tuple[int, int]:
    """Return the default height and width of requests in pixels, from defaults.json or the UNet's sample_size."""
    defaults = _defaults_json(base)
    latent, step = base.config("unet").get("sample_size"), base.size_step()
    side = latent * vae_scale if type(latent) is int else 0
    for name in ("height", "width"):
        value = defaults.get(name, side)
        if type(value) is not int or not SMALLEST_SIDE <= value <= LARGEST_SIDE or value % step:
            cause = f"is {value!r}" if name in defaults else f"is missing, and the UNet's sample_size is {latent!r}"
            raise CheckpointError(
                f"{base.root}/defaults.json: {name} {cause}.",
                f"Set a {name} that is a multiple of {step} from {SMALLEST_SIDE} to {LARGEST_SIDE}.",
            )
    return defaults.get("height", side), defaults.get("width", side)


def _defaults_json(base: Checkpoint) -> dict[str, Any]:
    """Return the entries of the model's defaults.json and of the preset. Raises CheckpointError if they disagree."""
    entries = dict(base.config(".", "defaults.json")) if (base.root / "defaults.json").is_file() else {}
    for key, value in base.preset.defaults.items() if base.preset else ():
        if entries.setdefault(key, value) != value:
            assert base.preset is not None
            raise CheckpointError(
                f"{base.root}/defaults.json sets {key} to {entries[key]!r:.80}, and the preset {base.preset.name} to "
                f"{value!r}.",
                "Remove that entry, or build without --preset.",
            )
    return entries


def read_noise_schedules(base: Checkpoint, refiner: Checkpoint | None) -> dict[str, AnyNoiseSchedule]:
    """Return the noise schedules that the networks were trained with.

    Raises CheckpointError for unsupported settings, or if the refiner's schedule differs.
    """
    schedules = {"base": read_scheduler(base).schedule}
    if refiner is not None:
        if isinstance(schedules["base"], EdmSchedule):
            raise CheckpointError(
                f"{base.root} is a model in the EDM formulation, which has no refiner.",
                "Leave out the refiner (--no-refiner).",
            )
        schedules["refiner"] = read_scheduler(refiner).schedule
        entries, others = (asdict(schedules[name]) for name in ("base", "refiner"))
        if differing := [name for name in entries if entries[name] != others[name]]:
            raise CheckpointError(
                f"{refiner.root} has another noise schedule than {base.root}, so it cannot continue its images: "
                f"{', '.join(f'{name} {others[name]!r} and {entries[name]!r}' for name in differing)}.",
                "Use a refiner of the same model and preset, or leave it out (--no-refiner).",
            )
    return schedules


def read_release_defaults(base: Checkpoint, refiner: Checkpoint | None) -> dict[str, object]:
    """Return the default request values: the checkpoint's scheduler and the entries of its optional defaults.json.

    The size is left out, because it is the release's native one. Raises CheckpointError for values that cannot be
    served.
    """
    scheduler = read_scheduler(base)
    entries = {key: value for key, value in _defaults_json(base).items() if key not in ("height", "width")}
    defaults: dict[str, object] = {"scheduler": scheduler.sampler} | entries
    try:
        checked = read_defaults(defaults)
    except ManifestError as error:
        raise CheckpointError(
            f"{base.root}/defaults.json: {error.args[0]}",
            "Correct or remove that entry; docs/requests.md has all values.",
        ) from error
    try:
        sampler_schedule(checked.scheduler, checked.num_inference_steps, scheduler.schedule)
    except RequestRefused as error:
        raise CheckpointError(
            f"{base.root}: the default for {error}", "Set such a value in defaults.json, or leave out --preset."
        ) from error
    layers = min(
        checkpoint.text_widths(folder).layers
        for checkpoint in filter(None, (base, refiner))
        for folder in ("text_encoder", "text_encoder_2")
        if (checkpoint.root / folder).is_dir()
    )
    if checked.clip_skip >= layers:
        raise CheckpointError(
            f"{base.root}/defaults.json: clip_skip is {checked.clip_skip}, and a text encoder has {layers} layers.",
            f"Set 0 to {layers - 1}.",
        )
    if checked.use_refiner and refiner is None:
        raise CheckpointError(
            f"{base.root}/defaults.json: use_refiner is true, but there is no refiner.",
            "Name one with --refiner, or remove that entry.",
        )
    return defaults


def read_tokenizers(base: Checkpoint) -> dict[str, ClipTokenizer]:
    """Return a model's tokenizers by name. Raises MissingComponent."""
    return {name: ClipTokenizer(*export_tokenizer(base.root / name)) for name in FAMILIES[base.family].tokenizers}


def write_tokenizers(base: Checkpoint, store: WritableStore) -> dict[str, TokenizerRecord]:
    """Store the tokenizers. Raises MissingComponent."""
    records = {}
    for name in FAMILIES[base.family].tokenizers:
        data, settings = export_tokenizer(base.root / name)
        records[name] = TokenizerRecord(blob=Blob(sha256=store.put_bytes(data), bytes=len(data)), **asdict(settings))
    return records
