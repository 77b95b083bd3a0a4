"""The files that are no checkpoints of a served family, by the names of their tensors, and what to do with each.

The names are those that ComfyUI (`comfy/model_detection.py`), SwarmUI (`T2IModelClassSorter.cs`), diffusers
(`loaders/single_file_utils.py`) and the trainers' scripts read and write.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

_OTHER_MODEL = "Preheat serves Stable Diffusion XL, 1 and 2: choose a checkpoint of one of them."
_CONTROLNET = "Build it with --controlnet NAME=FOLDER, from a folder in diffusers' layout."
_UNQUANTIZED = "Use the fp16, bf16 or fp32 file of the same model; `preheat build --precision fp8` quantizes it."


class Kind(NamedTuple):
    """A kind of file. pattern: a regular expression that one tensor's name matches. most: the most tensors it has."""

    what: str
    pattern: str
    remedy: str
    most: int | None = None

    def fits(self, names: Collection[str], text: str) -> bool:
        """True if the file is of this kind. `text`: the names, a line each."""
        return (self.most is None or len(names) <= self.most) and re.search(self.pattern, text, re.M) is not None


FOREIGN = (
    Kind(
        "an IP-Adapter", r"^(ip_adapter|image_proj)(_model)?\.",
        "Build it with --ip-adapter NAME=FILE, next to the model's folder or file.",
    ),
    Kind(
        "a ControlNet or a similar adapter",
        r"^(lora_controlnet$|control_model\.|controlnet|input_hint_block\.|zero_convs\.|adapter\.body|lllite_)"
        r"|^control_add_embedding\.|^task_embedding$",
        _CONTROLNET,
    ),
    Kind(
        "a LoRA adapter", r"(?i)lora|^lycoris_|\.(hada_w\d|lokr_w\d|oft_blocks|dora_scale)",
        "Add it with `preheat add-lora`, or merge it with --lora.",
    ),
    Kind(
        "an embedding of textual inversion",
        r"^(emb_params|clip_[lg]|text_encoders_[01]|string_to_param.*|<[^>\n]+>)$",
        "Build with --embedding-rows, and add it with `preheat add-embedding`.", 4,
    ),
    Kind("a motion module of AnimateDiff", r"motion_modules\.", _OTHER_MODEL),
    Kind("a Stable Video Diffusion", r"\.(time_stack|time_mixer)", _OTHER_MODEL),
    Kind("a Stable Diffusion 3", r"(^|\.)joint_blocks\.\d", _OTHER_MODEL),
    Kind("a FLUX model", r"(^|\.)(double_blocks\.\d+\.img_|single_transformer_blocks\.\d)", _OTHER_MODEL),
    Kind("a Stable Cascade", r"(^|\.)(clip_txt_mapper|clip_mapper|effnet_mapper)\.|\.channelwise\.", _OTHER_MODEL),
    Kind("a CosXL", r"^edm_vpred\.", "Its noise schedule is not supported. Choose a checkpoint that predicts noise or "
         "the velocity (v_pred)."),
    Kind("an unCLIP or depth model", r"^(embedder\.model\.visual|noise_augmentor|depth_model)\.", _OTHER_MODEL),
    Kind("a Stable Diffusion x4 upscaler", r"^(low_scale_model\.|model\.diffusion_model\.label_emb\.weight$)",
         _OTHER_MODEL),
    Kind("an AltDiffusion", r"^cond_stage_model\.roberta\.", _OTHER_MODEL),
    Kind(
        "a diffusion transformer",
        r"(^|\.)(transformer_blocks\.\d+\.attn\.|adaLN_modulation|adaln_single|patchify_proj|cap_embedder"
        r"|caption_projection|x_embedder|patch_embedding|txt_in|img_in)|^net\.blocks",
        _OTHER_MODEL,
    ),
    Kind(
        "a model with quantized weights",
        r"(^|\.)(scaled_fp8|scale_weight|scale_input|weight_scale|qweight|comfy_quant)$|\.(absmax|quant_map|quant_state)",
        _UNQUANTIZED,
    ),
)  # fmt: skip
"""Kinds that are recognized also if the file has a UNet. The first one that fits is named."""
PARTS = (
    Kind(
        "the UNet of a model in diffusers' names", r"^(unet\.)?down_blocks\.\d+\.(resnets|attentions)\.",
        "Copy the folder of its model, and replace unet/diffusion_pytorch_model.safetensors by this file.",
    ),
    Kind(
        "a small autoencoder for previews", r"^(taesd_\w+\.|(decoder|encoder)\.(layers\.)?\d+\.|\d+\.(conv|weight))",
        "Preheat fits its own map of previews while it builds. A full VAE is given with --vae.",
    ),
    Kind(
        "a VAE alone", r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|conv_out|mid|mid_block)[._]",
        "Name the model, and give this file with --vae.",
    ),
    Kind(
        "a text encoder alone",
        r"^((conditioner\.embedders\.\d\.|cond_stage_model\.|text_encoders?\.|clip_[lg]\.)|(transformer\.)?text_model\."
        r"|(model\.)?transformer\.resblocks\.|encoder\.block\.\d|encoder\.layers?\.\d|vision_model\.|visual\.)",
        "Name the model's file. Text encoders that a file lacks are read from the folder of --config.",
    ),
    Kind(
        "an upscaler, such as ESRGAN",
        r"^(params(_ema)?\.)?(conv_first\.|model\.(0|1\.sub\.\d+)\.|RRDB|body\.\d+\.|layers\.\d+\.residual_group\.|HR)",
        "Preheat has no upscalers: remove it from the command.",
    ),
)  # fmt: skip
"""Parts of models, for files that have no UNet in the names of a checkpoint."""
