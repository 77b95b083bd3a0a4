"""Presets of few-step and other models: the scheduler and the default request values of their model cards.

A preset replaces entries of a model's scheduler_config.json, and acts like a defaults.json of the model. It changes no
weights: a UNet that was distilled, or that a distilled LoRA was merged into, is part of the model's folder.
"""

from dataclasses import dataclass
from typing import Any

from model.store.manifest import Family


@dataclass(frozen=True, eq=False)
class Preset:
    """One preset.

    families: the families of models that it is for.
    scheduler: entries of scheduler_config.json.
    defaults: entries of defaults.json.
    embeds_guidance: whether its UNets take the guidance scale as an input.
    """

    name: str
    families: tuple[Family, ...]
    scheduler: dict[str, Any]
    defaults: dict[str, Any]
    embeds_guidance: bool = False


_BOTH: tuple[Family, ...] = ("sdxl", "sd")
# Of a folder whose config is of DPM++, the other entries choose among the samplers of that class.
_TRAILING = {"timestep_spacing": "trailing", "use_karras_sigmas": False, "algorithm_type": "dpmsolver++"}
_EULER, _EULER_A, _DDIM = (
    {"_class_name": name} | _TRAILING
    for name in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "DDIMScheduler")
)


def _unguided(steps: int) -> dict[str, Any]:
    return {"num_inference_steps": steps, "guidance_scale": 0.0}


def _presets() -> list[Preset]:
    small = {"width": 512, "height": 512}
    presets = [
        Preset("sdxl-turbo", ("sdxl",), _EULER_A, _unguided(4) | small),  # stabilityai/sdxl-turbo
        # stabilityai/sd-turbo, a model of 2.1 that predicts noise
        Preset("sd-turbo", ("sd",), _EULER | {"prediction_type": "epsilon"}, _unguided(4) | small),
        # latent-consistency/lcm-sdxl, SimianLuo/LCM_Dreamshaper_v7
        Preset("lcm", _BOTH, {}, {"scheduler": "LCM", "num_inference_steps": 4, "guidance_scale": 8.0}, True),
        Preset("lcm-lora", _BOTH, {}, {"scheduler": "LCM", "num_inference_steps": 4, "guidance_scale": 1.0}),
    ]
    for name, steps in (("playground-v2", 50), ("playground-v2.5", 50)):  # playgroundai, ...-1024px-aesthetic
        guided: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": 3.0}
        presets.append(Preset(name, ("sdxl",), {}, guided))
    # Single files that do not state what their UNet predicts: of older trainers, and 2.1 at 512 pixels
    velocity = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    presets.append(Preset("v-prediction", _BOTH, velocity, {}))
    presets.append(Preset("sd-2.1-base", ("sd",), {"prediction_type": "epsilon"}, small))
    # Their pages also ask for "clip skip 2", the layer that SDXL reads in any case.
    for name, steps, guidance in (
        ("pony", 25, 7.0),  # civitai.com/models/257749
        ("illustrious", 28, 6.0),  # OnomaAIResearch/Illustrious-xl-early-release-v0: 20 to 28 steps, 5 to 7.5
        ("noobai", 28, 5.5),  # Laxhar/noobai-XL-1.1: 25 to 30 steps, 5 to 6
        ("animagine", 28, 5.0),  # cagliostrolab/animagine-xl-4.0
    ):
        guided = {"scheduler": "Euler a", "num_inference_steps": steps, "guidance_scale": guidance}
        presets.append(Preset(name, ("sdxl",), {}, guided))
    # Laxhar/noobai-XL-Vpred-1.0: Euler only, 28 to 35 steps, 4 to 5, a guidance rescale of 0.2
    noobai = {"scheduler": "Euler", "num_inference_steps": 28, "guidance_scale": 4.5, "guidance_rescale": 0.2}
    presets.append(Preset("noobai-v-pred", ("sdxl",), velocity, noobai))
    # ByteDance/SDXL-Lightning
    presets += [Preset(f"lightning-{steps}", ("sdxl",), _EULER, _unguided(steps)) for steps in (2, 4, 8)]
    # ByteDance/Hyper-SD, and its models that keep guidance
    presets += [Preset(f"hyper-sd-{steps}", _BOTH, _DDIM, _unguided(steps)) for steps in (2, 4, 8)]
    for steps in (8, 12):
        guided = {"num_inference_steps": steps, "guidance_scale": 5.0}
        presets.append(Preset(f"hyper-sd-{steps}-guided", _BOTH, _DDIM, guided))
    return presets


PRESETS = {preset.name: preset for preset in _presets()}
