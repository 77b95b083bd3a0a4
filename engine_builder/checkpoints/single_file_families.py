"""The families of single-file checkpoints: how a file's tensors are named, and the JSON files of each model's folder.

The settings come from stabilityai/stable-diffusion-xl-base-1.0 and -refiner-1.0,
diffusers/stable-diffusion-xl-1.0-inpainting-0.1, playgroundai/playground-v2.5-1024px-aesthetic,
stable-diffusion-v1-5/stable-diffusion-v1-5 and stabilityai/stable-diffusion-2-1 on the Hugging Face Hub.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_builder.checkpoints.random_models import CONFIGS, REFINER_UNET, SD_CONFIGS, UNET, Config

UNET_PREFIX, VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
END_TOKEN = "<|endoftext|>"
_FIRST_CLIP, _SECOND_CLIP = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
_REFINER_CLIP = "conditioner.embedders.0.model."
_SD_CLIP, _SD2_CLIP = "cond_stage_model.transformer.", "cond_stage_model.model."
TEXT_PREFIXES = (_FIRST_CLIP, _SECOND_CLIP, _REFINER_CLIP, _SD_CLIP, _SD2_CLIP)


@dataclass(frozen=True, eq=False)
class SingleFileFamily:
    """A family of models whose checkpoints are single files.

    texts: subfolder of each text encoder -> the prefix of its tensors in the file.
    channels: input channels of the UNet. context: width of the text that the UNet reads.
    takes_sizes: the UNet takes pooled text and sizes (`label_emb`).
    pipeline: the class in model_index.json.
    unet, vae, scheduler: entries of their configs. encoders: entries of each text encoder's config, by subfolder.
    index: more entries of model_index.json. marker: a tensor that only files of this family have.
    states_prediction: files of this family have the same tensors for each prediction type.
    defaults: entries of defaults.json.
    """

    title: str
    texts: Mapping[str, str]
    channels: int
    context: int
    takes_sizes: bool
    pipeline: str
    unet: Config
    vae: Config
    encoders: Mapping[str, Config]
    scheduler: Config
    pads: Mapping[str, str]
    index: Config = field(default_factory=dict)
    marker: str | None = None
    states_prediction: bool = True
    defaults: Config = field(default_factory=dict)

    def files(self) -> dict[str, Config]:
        """Return the JSON files of a model's folder, without the tokenizers' files."""
        parts = {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
        parts |= {name: ["transformers", "CLIPTokenizer"] for name in self.pads}
        parts |= {name: ["transformers", _ENCODER_CLASSES[name]] for name in self.texts}
        parts["scheduler"] = ["diffusers", self.scheduler["_class_name"]]
        unet = {"_class_name": "UNet2DConditionModel", "in_channels": self.channels, **self.unet}
        files = {"unet/config.json": unet, "vae/config.json": {"_class_name": "AutoencoderKL", **self.vae}}
        files |= {
            f"{name}/config.json": {"architectures": [_ENCODER_CLASSES[name]], **entries}
            for name, entries in self.encoders.items()
        }
        files["scheduler/scheduler_config.json"] = self.scheduler
        files["model_index.json"] = {"_class_name": self.pipeline, **self.index, **parts}
        return files | ({"defaults.json": self.defaults} if self.defaults else {})


_ENCODER_CLASSES = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}
_BETAS: Config = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
    "trained_betas": None, "clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
}  # fmt: skip
_EULER: Config = _BETAS | {
    "_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon", "interpolation_type": "linear",
    "sample_max_value": 1.0, "timestep_spacing": "leading", "use_karras_sigmas": False,
}  # fmt: skip
_EDM: Config = {
    "_class_name": "EDMDPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++",
    "dynamic_thresholding_ratio": 0.995, "euler_at_final": False, "final_sigmas_type": "zero",
    "lower_order_final": True, "num_train_timesteps": 1000, "prediction_type": "epsilon", "rho": 7.0,
    "sample_max_value": 1.0, "sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002, "solver_order": 2,
    "solver_type": "midpoint", "thresholding": False,
}  # fmt: skip
_TOKENS: Config = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "max_position_embeddings": 77}
_ENCODERS: dict[str, Config] = {name: CONFIGS[name] | _TOKENS for name in ("text_encoder", "text_encoder_2")}
_SD2_ENCODER: Config = CONFIGS["text_encoder"] | _TOKENS | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 23,
    "hidden_act": "gelu", "projection_dim": 512,
}  # fmt: skip
_SD2_UNET: Config = SD_CONFIGS["unet"] | {
    "attention_head_dim": (5, 10, 20, 20), "cross_attention_dim": 1024, "sample_size": 96,
    "use_linear_projection": True, "upcast_attention": True,
}  # fmt: skip
_XL_VAE: Config = CONFIGS["vae"] | {"force_upcast": True}
_SD_VAE: Config = SD_CONFIGS["vae"]
_SD_INDEX: Config = {
    "feature_extractor": [None, None], "safety_checker": [None, None], "requires_safety_checker": False,
}  # fmt: skip
_XL: dict[str, Any] = {
    "texts": {"text_encoder": _FIRST_CLIP, "text_encoder_2": _SECOND_CLIP}, "context": 2048, "takes_sizes": True,
    "vae": _XL_VAE, "encoders": _ENCODERS, "scheduler": _EULER, "pads": {"tokenizer": END_TOKEN, "tokenizer_2": "!"},
    "index": {"force_zeros_for_empty_prompt": True},
}  # fmt: skip
_SD: dict[str, Any] = {
    "texts": {"text_encoder": _SD_CLIP}, "context": 768, "takes_sizes": False, "unet": SD_CONFIGS["unet"],
    "vae": _SD_VAE, "encoders": {"text_encoder": _ENCODERS["text_encoder"]},
    "scheduler": _BETAS | {"_class_name": "PNDMScheduler"}, "pads": {"tokenizer": END_TOKEN}, "index": _SD_INDEX,
}  # fmt: skip
_SD2: dict[str, Any] = _SD | {
    "texts": {"text_encoder": _SD2_CLIP}, "context": 1024, "unet": _SD2_UNET, "vae": _SD_VAE | {"sample_size": 768},
    "encoders": {"text_encoder": _SD2_ENCODER}, "pads": {"tokenizer": "!"},
}  # fmt: skip
_V: Config = _BETAS | {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
FAMILIES: dict[str, SingleFileFamily] = {
    "playground-v2.5": SingleFileFamily(
        title="Playground V2.5", channels=4, pipeline="StableDiffusionXLPipeline", unet=UNET, marker="edm_mean",
        defaults={"num_inference_steps": 50, "guidance_scale": 3.0},
        **_XL | {
            "scheduler": _EDM,
            "vae": _XL_VAE | {
                "scaling_factor": 0.5, "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
                "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
            },
        },
    ),
    "sdxl": SingleFileFamily(
        title="Stable Diffusion XL", channels=4, pipeline="StableDiffusionXLPipeline", unet=UNET, **_XL
    ),
    "sdxl-inpainting": SingleFileFamily(
        title="Stable Diffusion XL for inpainting", channels=9, pipeline="StableDiffusionXLInpaintPipeline", unet=UNET,
        **_XL,
    ),
    "sdxl-refiner": SingleFileFamily(
        title="the refiner of Stable Diffusion XL", channels=4, pipeline="StableDiffusionXLImg2ImgPipeline",
        unet=REFINER_UNET,
        **_XL | {
            "texts": {"text_encoder_2": _REFINER_CLIP}, "context": 1280,
            "encoders": {"text_encoder_2": _ENCODERS["text_encoder_2"]}, "pads": {"tokenizer_2": "!"},
            "index": {
                "force_zeros_for_empty_prompt": False, "requires_aesthetics_score": True,
                "text_encoder": [None, None], "tokenizer": [None, None],
            },
        },
    ),
    "sd-1.5": SingleFileFamily(
        title="Stable Diffusion 1.5", channels=4, pipeline="StableDiffusionPipeline", **_SD
    ),
    "sd-1.5-inpainting": SingleFileFamily(
        title="Stable Diffusion 1.5 for inpainting", channels=9, pipeline="StableDiffusionInpaintPipeline", **_SD
    ),
    "sd-2.1": SingleFileFamily(
        title="Stable Diffusion 2.1", channels=4, pipeline="StableDiffusionPipeline", states_prediction=False,
        **_SD2 | {"scheduler": _V},
    ),
    "sd-2.1-inpainting": SingleFileFamily(
        title="Stable Diffusion 2 for inpainting", channels=9, pipeline="StableDiffusionInpaintPipeline",
        **_SD2 | {
            "unet": _SD2_UNET | {"sample_size": 64, "upcast_attention": False},
            "vae": _SD_VAE, "scheduler": _SD["scheduler"],
        },
    ),
}  # fmt: skip
"""Name -> family. The first row that fits a file is its family."""
