"""The entries of a network's config.json that the wrappers read, and the values that they compute with.

A network is built by its own class, and a wrapper runs the modules of that network. So an entry that only changes
modules is read (`size`, `number`, ...), one that changes how the class calls them must have a certain value (`only`),
and `ignored` ones change no image. An entry without a rule is refused, because nothing here reads it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine_builder.checkpoints.folder import CheckpointConfig, CheckpointError
from model.pipeline.components import FAMILIES
from model.store.manifest import Family

_MAX_SIZE = 2**20  # of a dimension; SDXL's largest is its vocabulary, 49,408
_MAX_NESTING = 3  # of lists: transformer_layers_per_block has a list for each block
UNCHECKED = object()


@dataclass(frozen=True)
class Rule:
    """The accepted values of an entry.

    expected: the accepted values in words. accepts: True for an accepted value. default: the value of a missing entry
    if it may be refused, which is the class's own default.
    """

    expected: str
    accepts: Callable[[Any], bool]
    default: Any = UNCHECKED


def only(*values: Any, default: Any = UNCHECKED) -> Rule:
    """Accept these values. `default`: of the class, unless it is the first of them."""
    expected = " or ".join(map(repr, values))
    first = values[0] if default is UNCHECKED else default
    # Compared with the type, because True equals 1.
    return Rule(expected, lambda value: any(type(value) is type(one) and value == one for one in values), first)


def each_of(*names: str) -> Rule:
    """Accept a list of these names."""
    return Rule(
        f"a list of {' and '.join(names)}",
        lambda value: isinstance(value, list | tuple) and bool(value) and all(one in names for one in value),
    )


def or_null(rule: Rule) -> Rule:
    """Accept null, too."""
    return Rule(f"{rule.expected}, or null", lambda value: value is None or rule.accepts(value))


def _is_size(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value <= _MAX_SIZE


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_sizes(value: Any, least: int, nesting: int = _MAX_NESTING) -> bool:
    if isinstance(value, list | tuple) and nesting:
        return bool(value) and all(_are_sizes(one, least, nesting - 1) for one in value)
    return _is_size(value, least)


size = Rule(f"a whole number from 1 to {_MAX_SIZE}", _is_size)
sizes = Rule(f"whole numbers from 1 to {_MAX_SIZE}", lambda value: _are_sizes(value, 1))
counts = Rule(f"whole numbers from 0 to {_MAX_SIZE}", lambda value: _are_sizes(value, 0))
number = Rule("a number", _is_number)
positive = Rule("a positive number", lambda value: _is_number(value) and value > 0)
flag = Rule("true or false", lambda value: type(value) is bool)
no = only(False, None)  # older converters wrote null for false
token = Rule("the number of a token", lambda value: _is_size(value, 0))
ignored = Rule("any value", lambda value: True)
Rules = dict[str, Rule]

_ACTIVATIONS = only(
    "quick_gelu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish", "mish", "tanh",
    "sigmoid", "linear",
)  # fmt: skip
_PROVENANCE: Rules = dict.fromkeys(
    ("_class_name", "_diffusers_version", "_name_or_path", "_commit_hash", "torch_dtype", "dtype", "architectures"),
    ignored,
)
# diffusers' EMAModel, which training scripts use, adds its own settings to the config of the averaged network.
_AVERAGING: Rules = dict.fromkeys(
    ("decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"), ignored
)
_MIDDLE = only("UNetMidBlock2DCrossAttn", "UNetMidBlock2D")
_UNET_AND_CONTROLNET: Rules = {
    "in_channels": size,
    "flip_sin_to_cos": flag,
    "freq_shift": number,
    "down_block_types": each_of("DownBlock2D", "CrossAttnDownBlock2D"),
    "only_cross_attention": only(False),
    "block_out_channels": sizes,
    "layers_per_block": sizes,
    "downsample_padding": only(1),
    "mid_block_scale_factor": only(1, 1.0),
    "act_fn": only("silu", "swish"),
    "norm_num_groups": size,
    "norm_eps": positive,
    "cross_attention_dim": size,
    "transformer_layers_per_block": counts,
    "encoder_hid_dim": only(None),
    "encoder_hid_dim_type": only(None),
    "attention_head_dim": sizes,
    "num_attention_heads": only(None),
    "use_linear_projection": or_null(flag),
    "class_embed_type": only(None),
    "addition_time_embed_dim": or_null(size),
    "addition_embed_type_num_heads": ignored,  # of the type "text"
    "num_class_embeds": only(None),
    "upcast_attention": or_null(flag),  # diffusers' fused attention, which is its default, does not read it
    "resnet_time_scale_shift": only("default"),
    "projection_class_embeddings_input_dim": or_null(size),
}
UNET: Rules = _UNET_AND_CONTROLNET | {
    "sample_size": ignored,  # `release_settings` reads it
    "out_channels": size,
    "center_input_sample": no,
    "mid_block_type": _MIDDLE,
    "up_block_types": each_of("UpBlock2D", "CrossAttnUpBlock2D"),
    "dropout": ignored,
    "reverse_transformer_layers_per_block": or_null(counts),
    "dual_cross_attention": no,
    "resnet_skip_time_act": no,
    "resnet_out_scale_factor": only(1.0, 1),
    "time_embedding_type": only("positional"),
    "time_embedding_dim": or_null(size),
    "time_embedding_act_fn": only(None),
    "timestep_post_act": only(None, "silu", "swish", "mish", "gelu", "relu"),
    "time_cond_proj_dim": or_null(size),
    "conv_in_kernel": only(3),
    "conv_out_kernel": only(3),
    "attention_type": only("default"),
    "class_embeddings_concat": no,
    "mid_block_only_cross_attention": only(None, False),
    "cross_attention_norm": only(None),
}
_CONTROLNETS: Rules = _UNET_AND_CONTROLNET | {
    "conditioning_channels": only(3),
    "controlnet_conditioning_channel_order": only("rgb", "bgr"),
    "conditioning_embedding_out_channels": sizes,
    "global_pool_conditions": no,
}
CONTROLNET: Rules = _CONTROLNETS | {"mid_block_type": _MIDDLE}
UNION_CONTROLNET: Rules = _CONTROLNETS | {
    "num_control_type": size,
    "num_trans_channel": size,
    "num_trans_head": size,
    "num_trans_layer": size,
    "num_proj_channel": size,
}
VAE: Rules = {
    "in_channels": only(3),
    "out_channels": only(3),
    "down_block_types": each_of("DownEncoderBlock2D"),
    "up_block_types": each_of("UpDecoderBlock2D"),
    "block_out_channels": sizes,
    "layers_per_block": size,
    "act_fn": only("silu", "swish"),
    "latent_channels": size,
    "norm_num_groups": size,
    "sample_size": ignored,  # of tiles, which are not used
    "scaling_factor": positive,
    "shift_factor": only(None),
    "latents_mean": ignored,  # `release_settings` checks both
    "latents_std": ignored,
    "force_upcast": or_null(flag),
    "use_quant_conv": flag,
    "use_post_quant_conv": flag,
    "mid_block_add_attention": only(True),
}
# Entries that transformers writes for every network. Older releases wrote options of text generation, too.
_TRANSFORMERS: Rules = {
    **dict.fromkeys(
        (
            "transformers_version", "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id",
            "problem_type", "chunk_size_feed_forward", "torchscript", "use_bfloat16", "tf_legacy_loss",
            "tie_word_embeddings", "tie_encoder_decoder", "cross_attention_hidden_size", "finetuning_task",
            "tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id", "task_specific_params",
            "gradient_checkpointing", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
            "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
            "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
            "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
            "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
            "begin_suppress_tokens", "use_cache", "output_past", "num_labels", "attn_implementation",
            "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
        ),
        ignored,
    ),
    "is_encoder_decoder": no,
    "is_decoder": no,
    "add_cross_attention": no,
    "pruned_heads": only({}),
    "initializer_range": ignored,
    "initializer_factor": ignored,
}  # fmt: skip
_CLIP: Rules = _TRANSFORMERS | {
    "hidden_size": size,
    "intermediate_size": size,
    "projection_dim": size,
    "num_hidden_layers": size,
    "num_attention_heads": size,
    "hidden_act": _ACTIVATIONS,
    "layer_norm_eps": positive,
    "attention_dropout": ignored,
    "dropout": ignored,  # of older releases
}
TEXT_ENCODER: Rules = _CLIP | {
    "model_type": only("clip_text_model"),
    "vocab_size": size,
    "max_position_embeddings": size,
    "pad_token_id": ignored,  # a tokenizer pads
    "bos_token_id": ignored,
    "eos_token_id": token,
    "use_attention_mask": no,
}
IMAGE_ENCODER: Rules = _CLIP | {
    "model_type": only("clip_vision_model"),
    "num_channels": only(3),
    "image_size": size,
    "patch_size": size,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ignored),
}
SAFETY_CHECKER: Rules = _TRANSFORMERS | {
    "model_type": only("clip"),
    "projection_dim": size,
    "logit_scale_init_value": ignored,
    "vision_config": ignored,  # checked by the rules of an image encoder
    "vision_config_dict": ignored,
    "text_config": ignored,
    "text_config_dict": ignored,
}
_OF_FAMILY: Mapping[Family, Rules] = {
    "sdxl": {"addition_embed_type": only("text_time", default=None)},
    "sd": {"addition_embed_type": only(None)},
}
# The class of a network -> its rules.
RULES: Mapping[str, Rules] = {
    "UNet2DConditionModel": UNET,
    "ControlNetModel": CONTROLNET,
    "ControlNetUnionModel": UNION_CONTROLNET,
    "AutoencoderKL": VAE,
    "CLIPTextModel": TEXT_ENCODER,
    "CLIPTextModelWithProjection": TEXT_ENCODER,
    "CLIPVisionModelWithProjection": IMAGE_ENCODER,
    "StableDiffusionSafetyChecker": SAFETY_CHECKER,
}


def rules_of(class_name: str, family: Family) -> Rules:
    """Return the rules of a network's config.json, without the rules of its origin."""
    rules = RULES[class_name]
    return rules | _OF_FAMILY[family] if "addition_time_embed_dim" in rules else rules


def check_config(config: CheckpointConfig, class_name: str, family: Family, entry: str = "") -> None:
    """Raise CheckpointError for an entry that no wrapper reads, or a value that no wrapper computes with.

    entry: the entry of the file that has `config`; empty: it is the whole file.
    """
    rules = {**_PROVENANCE, **_AVERAGING, **rules_of(class_name, family)}
    where = f"{config.path}: {f'{entry}.' if entry else ''}"
    for key, value in config.items():
        rule = rules.get(key)
        if rule is None and value is not None:
            raise CheckpointError(
                f"{where}{key:.80} is {value!r:.80}, and nothing here reads this entry of a {class_name}.",
                f"Remove {key:.80}, if the network computes the same without it.",
            )
        if rule is not None and not rule.accepts(value):
            raise CheckpointError(f"{where}{key} is {value!r:.80}, expected {rule.expected}.", _remedy(rule, family))
    for key, rule in rules.items():
        if key not in config and rule.default is not UNCHECKED and not rule.accepts(rule.default):
            raise CheckpointError(
                f"{where}{key} is missing, which means {rule.default!r}, expected {rule.expected}.",
                _remedy(rule, family),
            )


def _remedy(rule: Rule, family: Family) -> str:
    if rule.default is UNCHECKED:
        return "Use the config.json that belongs to the weights."
    return f"Only networks of a plain {FAMILIES[family].title} are supported. Use another model."
