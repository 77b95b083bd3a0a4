"""A model folder's JSON and tokenizers -> what a release says beside its networks. Nothing is compiled or loaded."""

import math
from typing import Any

from engine_builder.checkpoints.tokenizers import export_tokenizer
from engine_builder.networks.network import (
    ModelFolder,
    ModelFolderError,
)
from model.api.request import (
    LARGEST_SIDE,
    SMALLEST_SIDE,
    read_defaults,
)
from model.denoising.noise_schedule import NoiseSchedule
from model.denoising.samplers import configured_sampler
from model.store.manifest import Blob, RefinerSettings, Settings, TokenizerRecord
from model.store.store import Store


def read_settings(base: ModelFolder, refiner: ModelFolder | None) -> Settings:
    """What the pipeline must know, from the folders' JSON. Raises ModelFolderError for what is not served."""
    widths, vae = base.widths(), base.config("vae")
    if vae.get("latents_mean") or vae.get("latents_std"):
        raise ModelFolderError(f"{base.root}/vae normalises latents (latents_mean), which is not served.")
    scaling = vae["scaling_factor"]
    if type(scaling) not in (int, float) or not 0 < scaling < math.inf:
        raise ModelFolderError(f"{base.root}/vae/config.json: scaling_factor is {scaling!r}; SDXL's is 0.13025.")
    native_height, native_width = _native_size(base, widths.vae_scale)
    refined = None
    if refiner is not None:
        index = refiner.index
        refined = RefinerSettings(
            force_zeros_for_empty_prompt=index.get("force_zeros_for_empty_prompt", True),
            requires_aesthetics_score=index.get("requires_aesthetics_score", False),
        )
    return Settings(
        native_height=native_height,
        native_width=native_width,
        vae_scale_factor=widths.vae_scale,
        vae_scaling_factor=scaling,
        latent_channels=widths.latent_channels,
        force_zeros_for_empty_prompt=base.index.get("force_zeros_for_empty_prompt", True),
        refiner=refined,
    )


def _native_size(base: ModelFolder, vae_scale: int) -> tuple[int, int]:
    """Height and width (pixels) of a request that asks for none: defaults.json's, else the UNet's sample_size."""
    own = _own_defaults(base)
    latent, step = base.config("unet").get("sample_size"), base.size_step()
    side = latent * vae_scale if type(latent) is int else 0
    for name in ("height", "width"):
        value = own.get(name, side)
        if type(value) is not int or not SMALLEST_SIDE <= value <= LARGEST_SIDE or value % step:
            found = f"{name} is {value!r}" if name in own else f"it has none, and the UNet's sample_size is {latent!r}"
            raise ModelFolderError(
                f"{base.root}/defaults.json: {found}; give a {name} that is a multiple of {step} from {SMALLEST_SIDE} "
                f"to {LARGEST_SIDE}."
            )
    return own.get("height", side), own.get("width", side)


def _own_defaults(base: ModelFolder) -> dict[str, Any]:
    return base.config(".", "defaults.json") if (base.root / "defaults.json").is_file() else {}


def read_schedulers(base: ModelFolder, refiner: ModelFolder | None) -> dict[str, NoiseSchedule]:
    """The noise schedule each pipeline was trained with. Raises ManifestError for settings that are not served."""
    read = {"base": NoiseSchedule.from_config(base.config("scheduler", "scheduler_config.json"))}
    if refiner is not None:
        read["refiner"] = NoiseSchedule.from_config(refiner.config("scheduler", "scheduler_config.json"))
        if read["refiner"] != read["base"]:
            raise ModelFolderError(
                f"{refiner.root} was trained with another noise schedule than {base.root}: it cannot take "
                "over half-way through."
            )
    return read


def read_release_defaults(base: ModelFolder, refiner: ModelFolder | None) -> dict[str, object]:
    """Default request values: the scheduler the folder asks for, and what its optional defaults.json says, but for
    the size, which is the release's native one. Raises ManifestError or ModelFolderError for what cannot be served."""
    sampler = configured_sampler(base.config("scheduler", "scheduler_config.json"))
    own = {key: value for key, value in _own_defaults(base).items() if key not in ("height", "width")}
    defaults: dict[str, object] = {"scheduler": sampler} | own
    if read_defaults(defaults).use_refiner and refiner is None:
        raise ModelFolderError(
            f"{base.root}/defaults.json: use_refiner is true, and there is no refiner: give one (--refiner), or take "
            "that out."
        )
    return defaults


def write_tokenizers(base: ModelFolder, store: Store) -> dict[str, TokenizerRecord]:
    """Both tokenizers as blobs."""
    records = {}
    for name in ("tokenizer", "tokenizer_2"):
        data, settings = export_tokenizer(base.root / name)
        records[name] = TokenizerRecord(
            blob=Blob(sha256=store.put_bytes(data), bytes=len(data)),
            max_length=settings.max_length,
            pad_token_id=settings.pad_token_id,
            bos_token_id=settings.bos_token_id,
            eos_token_id=settings.eos_token_id,
        )
    return records
