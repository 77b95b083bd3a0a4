"""Read a scheduler_config.json as diffusers 0.42.1 reads it: the noise schedule of a model and its default sampler.

Each entry that a class of diffusers reads is in one of four groups:

- the noise that the model was trained with: used (`USUAL`), or refused (`MODEL`);
- how the class samples: used, or built as another setting with a warning (`OPTIONS`), because it is only the default
  of requests;
- without effect on the images, given the values of the others (`WITHOUT_EFFECT`);
- of another class: ignored, as diffusers does.

A class that is not served is built as the nearest sampler, with a warning (`REPLACED_CLASSES`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from model.denoising import sampler_specs as specs
from model.denoising.edm_schedule import AnyNoiseSchedule, EdmSchedule
from model.denoising.noise_schedule import OWN_SPACING, InvalidSchedule, NoiseSchedule
from model.store.manifest import Family
from model.validation import MAX_TRAIN_TIMESTEPS

_DPM = "DPMSolverMultistepScheduler"
_EDM_EULER, _EDM_DPM = "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"
_SAME_CLASSES = {"DDIMParallelScheduler": "DDIMScheduler"}  # the same images; it can also denoise steps in parallel
# A class whose steps are no coefficients of the last two estimates -> the sampler that came closest on data/tiny-sdxl
# with as many runs of the UNet (docs/log/correctness.md). DPMSolverSDEScheduler was not measured.
REPLACED_CLASSES = {
    "PNDMScheduler": specs.EULER,
    "LMSDiscreteScheduler": specs.DPM_2M,
    "UniPCMultistepScheduler": specs.DPM_2M,
    "DEISMultistepScheduler": specs.DPM_2M,
    "DPMSolverSinglestepScheduler": specs.DPM_2M_KARRAS,
    "SASolverScheduler": specs.DPM_2M_KARRAS,
    "DPMSolverSDEScheduler": specs.DPM_2M_SDE_KARRAS,
    "KDPM2DiscreteScheduler": specs.HEUN,
    "KDPM2AncestralDiscreteScheduler": specs.EULER_A,
    "DDPMScheduler": specs.EULER_A,
    "DDPMParallelScheduler": specs.EULER_A,
    "TCDScheduler": specs.DDIM,
}
# The same for DPM++ without Karras sigmas: its SDE solver, and entries for which DPM++ 2M is not the closest.
NEAREST_TO_SDE = specs.EULER_A
NEAREST_TO_OPTIONS: dict[tuple[str, Any], specs.SamplerSpec] = {
    ("solver_order", 1): specs.DDIM,
    ("use_lu_lambdas", True): specs.DPM_2M_KARRAS,
    ("use_exponential_sigmas", True): specs.DPM_2M_KARRAS,
    ("use_beta_sigmas", True): specs.DPM_2M_KARRAS,
}


class _Option(NamedTuple):
    """The values of an entry. served: those with diffusers' images. replaced: built as the first served one."""

    served: tuple[Any, ...]
    replaced: tuple[Any, ...]


OPTIONS: dict[str, _Option] = {
    "use_karras_sigmas": _Option((False, None), (True,)),
    "use_exponential_sigmas": _Option((False, None), (True,)),
    "use_beta_sigmas": _Option((False, None), (True,)),
    "use_lu_lambdas": _Option((False, None), (True,)),
    "clip_sample": _Option((False, None), (True,)),
    "thresholding": _Option((False, None), (True,)),
    "interpolation_type": _Option(("linear",), ("log_linear",)),
    "final_sigmas_type": _Option(("zero",), ("sigma_min",)),
    "algorithm_type": _Option(("dpmsolver++", "sde-dpmsolver++"), ("dpmsolver", "sde-dpmsolver", "deis")),
    "solver_order": _Option((2,), (1, 3)),
    "solver_type": _Option(("midpoint", "logrho", "bh1", "bh2"), ("heun",)),  # diffusers computes the last as the first
    "lambda_min_clipped": _Option((-math.inf,), (int, float)),
    "sigma_schedule": _Option(("karras",), ("exponential",)),
}
# Entries that describe a model of another kind, with the values of the models that are served.
MODEL: dict[str, tuple[Any, ...]] = {
    "trained_betas": (None,),
    "use_flow_sigmas": (False, None),
    "timestep_type": ("discrete", "continuous"),  # continuous: see `_check_model`
    "variance_type": (None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
}
WITHOUT_EFFECT = {
    # parameters of clip_sample and thresholding
    "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value",
    # parameters of flow sigmas
    "flow_shift", "use_dynamic_shifting", "time_shift_type",
    # about the last step, which is of first order because the last sigma is zero, and about a third order
    "lower_order_final", "euler_at_final",
}  # fmt: skip

_COMMON = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
    "timestep_spacing", "steps_offset",
)  # fmt: skip
_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_CLIP = ("clip_sample", "clip_sample_range")
_THRESHOLD = ("thresholding", "dynamic_thresholding_ratio", "sample_max_value")
_SOLVER = ("solver_order", "solver_type", "algorithm_type", "lower_order_final", "euler_at_final", "final_sigmas_type")
_EDM = (
    "sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "num_train_timesteps", "prediction_type", "rho",
    "final_sigmas_type",
)  # fmt: skip
# Every key of each served class's constructor.
CLASS_KEYS: dict[str, tuple[str, ...]] = {
    "EulerDiscreteScheduler": (
        *_COMMON, *_SIGMAS, "rescale_betas_zero_snr", "interpolation_type", "sigma_min", "sigma_max", "timestep_type",
        "final_sigmas_type",
    ),
    "EulerAncestralDiscreteScheduler": (*_COMMON, "rescale_betas_zero_snr"),
    "HeunDiscreteScheduler": (*_COMMON, *_SIGMAS, *_CLIP),
    "DDIMScheduler": (*_COMMON, *_CLIP, *_THRESHOLD, "set_alpha_to_one", "rescale_betas_zero_snr"),
    _DPM: (
        *_COMMON, *_SIGMAS, *_THRESHOLD, *_SOLVER, "rescale_betas_zero_snr", "use_lu_lambdas", "use_flow_sigmas",
        "flow_shift", "lambda_min_clipped", "variance_type", "use_dynamic_shifting", "time_shift_type",
    ),
    "LCMScheduler": (
        *_COMMON, *_CLIP, *_THRESHOLD, "set_alpha_to_one", "rescale_betas_zero_snr", "original_inference_steps",
        "timestep_scaling",
    ),
    _EDM_EULER: _EDM,
    _EDM_DPM: tuple(dict.fromkeys((*_EDM, *_SOLVER, *_THRESHOLD))),
}  # fmt: skip
# Defaults of beta_start, beta_end and beta_schedule that are not 0.0001, 0.02 and linear.
_BETAS: dict[str, tuple[float, float, str]] = {
    "HeunDiscreteScheduler": (0.00085, 0.012, "linear"),
    "KDPM2DiscreteScheduler": (0.00085, 0.012, "linear"),
    "KDPM2AncestralDiscreteScheduler": (0.00085, 0.012, "linear"),
    "DPMSolverSDEScheduler": (0.00085, 0.012, "linear"),
    "LCMScheduler": (0.00085, 0.012, "scaled_linear"),
    "TCDScheduler": (0.00085, 0.012, "scaled_linear"),
}
# For remedies: the values of SDXL, Stable Diffusion 1 and 2, and of Playground V2.5 for its formulation.
USUAL = {
    "num_train_timesteps": "1000", "beta_start": "0.00085", "beta_end": "0.012", "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon, or v_prediction", "timestep_spacing": "leading", "steps_offset": "1",
    "set_alpha_to_one": "false", "rescale_betas_zero_snr": "false", "original_inference_steps": "50",
    "timestep_scaling": "10.0", "sigma_min": "0.002", "sigma_max": "80.0", "sigma_data": "0.5", "rho": "7.0",
}  # fmt: skip


@dataclass(frozen=True)
class SchedulerConfig:
    """The content of a scheduler_config.json for a release.

    schedule: the noise schedule. sampler: the public name of the sampler of requests without `scheduler`.
    config: the config from which a scheduler of diffusers denoises as this release does: the file's entries, with the
        changes of diffusers' pipeline, and with the served settings where others are replaced.
    warnings: a sentence for each class or entry that is built as another one.
    """

    schedule: AnyNoiseSchedule
    sampler: str
    config: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def read_scheduler(checkpoint: Checkpoint) -> SchedulerConfig:
    """Read the scheduler_config.json of a checkpoint. Raises CheckpointError.

    model_index.json names its class, as in diffusers, unless a preset has one.
    """
    entries = checkpoint.config("scheduler", "scheduler_config.json")
    stated, of_index = entries.get("_class_name"), checkpoint.index.get("scheduler")
    warnings: tuple[str, ...] = ()
    is_preset = checkpoint.preset is not None and "_class_name" in checkpoint.preset.scheduler
    if not is_preset and isinstance(of_index, list) and len(of_index) == 2 and of_index[1] != stated:
        entries["_class_name"] = of_index[1]
        if stated is not None:
            warnings = (
                f"{entries.path} names {stated!r:.80} and model_index.json {of_index[1]!r:.80}. The second one is "
                "used, as in diffusers.",
            )
    read = read_scheduler_config(entries, checkpoint.family, str(entries.path))
    return replace(read, warnings=warnings + read.warnings)


def read_scheduler_config(
    entries: Mapping[str, Any], family: Family, path: str = "scheduler_config.json"
) -> SchedulerConfig:
    """Return what the entries of a scheduler_config.json say about a release of a family.

    A missing key means the class's default, as in diffusers. `path`: for messages. Raises CheckpointError, which names
    the key, its value and a value that is served.
    """
    name = entries.get("_class_name")
    name = _SAME_CLASSES.get(name, name) if isinstance(name, str) else name
    known = [*CLASS_KEYS, *_SAME_CLASSES, *REPLACED_CLASSES]
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(
            f"{path}: _class_name is {name!r:.80}, and Preheat does not know such a scheduler of Stable Diffusion.",
            f"Set the class that the model was made for, one of {', '.join(known)}.",
        )
    # 1. the class's defaults, and what diffusers' pipelines of the family change
    config = dict(entries)
    if name == "DDIMScheduler":
        config.setdefault("clip_sample", True)
    if family == "sd":
        config["steps_offset"] = 1
        config["clip_sample"] = False if config.get("clip_sample") is True else config.get("clip_sample", False)
    _check_model(name, config, path)
    # 2. the sampler, and what replaces a class or an option
    if name in REPLACED_CLASSES:
        sampler = REPLACED_CLASSES[name]
        if config.get("use_karras_sigmas") is True:
            nearest, options = sampler.diffusers
            sampler = _implemented(nearest, {**options, "use_karras_sigmas": True}) or sampler
        problems = {f"{name} is not served": f"{sampler.name}, the nearest one"}
    else:
        sampler, problems = _served_sampler(name, config, path)
    warnings = (
        f"{problem}. Requests without `scheduler` use {used}. Requests and defaults.json may set another sampler."
        for problem, used in problems.items()
    )
    # 3. the noise schedule
    is_edm = name in (_EDM_EULER, _EDM_DPM)
    try:
        schedule = _edm_schedule(config) if is_edm else _noise_schedule(name, config)
    except InvalidSchedule as error:
        raise CheckpointError(
            f"{path}: {error.field} {error.problem}",
            f"Set the value that the model was trained with; it is commonly {USUAL[error.field]}.",
        ) from error
    # 4. the config of the scheduler of diffusers that denoises as this release does
    config |= {key: option.served[0] for key, option in OPTIONS.items() if key in config or key == "clip_sample"}
    if isinstance(schedule, NoiseSchedule):
        config |= {key: getattr(schedule, key) for key in ("beta_start", "beta_end", "beta_schedule")}
    class_name, settings = sampler.implementation(is_edm)
    config |= {**settings, "_class_name": class_name}
    return SchedulerConfig(schedule, sampler.name, config, tuple(warnings))


def _implemented(name: str, options: Mapping[str, Any]) -> specs.SamplerSpec | None:
    """Return the sampler that a class of diffusers implements with these options. None: it is not served."""
    for spec in specs.SPECS.values():
        for served in (spec.diffusers, spec.edm):
            if served and served.name == name and served.options.items() <= options.items():
                return spec
    return None


def _check_model(name: str, config: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointError for an entry of a model of another kind."""
    for key in set(MODEL) & set(config) & set(CLASS_KEYS.get(name, MODEL)):
        if not _is_one_of(config[key], MODEL[key]):
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r:.80}. Such models are not supported.",
                f"Set {json.dumps(MODEL[key][0])} if the model was trained without it.",
            )
    continuous = name == "EulerDiscreteScheduler" and config.get("timestep_type") == "continuous"
    if continuous and config.get("prediction_type") == "v_prediction":
        raise CheckpointError(
            f"{path}: timestep_type is 'continuous' with prediction_type 'v_prediction', so the UNet reads noise "
            "levels as timesteps. Such models are not supported.",
            'Set "discrete" if the model was trained with timesteps.',
        )


def _served_sampler(name: str, config: Mapping[str, Any], path: str) -> tuple[specs.SamplerSpec, dict[str, str]]:
    """Return the sampler of a served class. Also return each problem with an option, and what is used instead."""
    replaced: dict[str, Any] = {}
    is_dpm, karras = name == _DPM, config.get("use_karras_sigmas") is True
    for key in CLASS_KEYS[name]:
        if key not in OPTIONS or key not in config:
            continue
        value, option = config[key], OPTIONS[key]
        if _is_one_of(value, option.served) or (is_dpm and karras and key == "use_karras_sigmas"):
            continue
        if not _is_one_of(value, option.replaced) and type(value) not in option.replaced:
            raise CheckpointError(f"{path}: {key} is {value!r:.80}.", f"Set {json.dumps(option.served[0])}.")
        replaced[key] = value
    algorithm = config.get("algorithm_type")
    solver = "sde-dpmsolver++" if algorithm in ("sde-dpmsolver++", "sde-dpmsolver") else "dpmsolver++"
    own = sampler = _implemented(name, {"algorithm_type": solver, "use_karras_sigmas": karras})
    if sampler is None:
        sampler = NEAREST_TO_SDE
        replaced.setdefault("algorithm_type", algorithm)
    elif is_dpm and not karras:
        for key, value in replaced.items():
            sampler = NEAREST_TO_OPTIONS.get((key, value), sampler)
    return sampler, {
        f"{key} {json.dumps(value)} is not served for {name}": f"{sampler.name} "
        f"with {json.dumps(OPTIONS[key].served[0])}"
        if sampler is own
        else f"{sampler.name}, the nearest one"
        for key, value in replaced.items()
    }


def _noise_schedule(name: str, config: Mapping[str, Any]) -> NoiseSchedule:
    start, end, kind = _BETAS.get(name, (0.0001, 0.02, "linear"))
    settings: dict[str, Any] = {"beta_start": start, "beta_end": end, "beta_schedule": kind}
    settings |= {"num_train_timesteps": 1000, "steps_offset": 0, "set_alpha_to_one": True}
    settings["timestep_spacing"] = OWN_SPACING
    settings |= {field.name: config[field.name] for field in fields(NoiseSchedule) if field.name in config}
    if config.get("timestep_spacing") == OWN_SPACING:  # a value of manifests, and none of diffusers
        raise InvalidSchedule("timestep_spacing", f"is {OWN_SPACING!r}; served: leading or trailing or linspace.")
    if settings.get("rescale_betas_zero_snr") is None:
        settings["rescale_betas_zero_snr"] = False
    return NoiseSchedule(**settings)


def _edm_schedule(config: Mapping[str, Any]) -> EdmSchedule:
    count = config.get("num_train_timesteps", 1000)  # without effect, but diffusers allocates as many numbers
    if type(count) is not int or not 1 <= count <= MAX_TRAIN_TIMESTEPS:
        raise InvalidSchedule("num_train_timesteps", f"is {count!r:.80}, not 1 to {MAX_TRAIN_TIMESTEPS}.")
    return EdmSchedule(**{field.name: config[field.name] for field in fields(EdmSchedule) if field.name in config})


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    """True if a value is equal to one of the others and of its type: 1 is not True."""
    return any(type(value) is type(other) and value == other for other in values)
