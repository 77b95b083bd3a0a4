"""The entries of the config.json files of published models, as far as they matter to what is refused.

Older releases of the libraries wrote null for false, averaged networks have the settings of their average, and
transformers 4 wrote options of text generation.
"""

from typing import Any

from model.store.manifest import Family

_CROSS, _DOWN, _UP_CROSS, _UP = "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"
_SDXL_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.19.0.dev0", "act_fn": "silu",
    "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64, "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280], "center_input_sample": False,
    "class_embed_type": None, "class_embeddings_concat": False, "conv_in_kernel": 3, "conv_out_kernel": 3,
    "cross_attention_dim": 2048, "cross_attention_norm": None, "down_block_types": [_DOWN, _CROSS, _CROSS],
    "downsample_padding": 1, "dual_cross_attention": False, "encoder_hid_dim": None, "encoder_hid_dim_type": None,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
    "mid_block_only_cross_attention": None, "mid_block_scale_factor": 1, "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-05, "norm_num_groups": 32, "num_attention_heads": None, "num_class_embeds": None,
    "only_cross_attention": False, "out_channels": 4, "projection_class_embeddings_input_dim": 2816,
    "resnet_out_scale_factor": 1.0, "resnet_skip_time_act": False, "resnet_time_scale_shift": "default",
    "sample_size": 128, "time_cond_proj_dim": None, "time_embedding_act_fn": None, "time_embedding_dim": None,
    "time_embedding_type": "positional", "timestep_post_act": None, "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": [_UP_CROSS, _UP_CROSS, _UP], "upcast_attention": None, "use_linear_projection": True,
}  # fmt: skip
_SD_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6.0", "act_fn": "silu", "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280], "center_input_sample": False, "cross_attention_dim": 768,
    "down_block_types": [_CROSS, _CROSS, _CROSS, _DOWN], "downsample_padding": 1, "flip_sin_to_cos": True,
    "freq_shift": 0, "in_channels": 4, "layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05,
    "norm_num_groups": 32, "out_channels": 4, "sample_size": 64,
    "up_block_types": [_UP, _UP_CROSS, _UP_CROSS, _UP_CROSS],
}  # fmt: skip
_CONTROLNET: dict[str, Any] = {
    key: value
    for key, value in _SDXL_UNET.items()
    if key
    in (
        "act_fn", "addition_embed_type", "addition_embed_type_num_heads", "addition_time_embed_dim",
        "attention_head_dim", "block_out_channels", "class_embed_type", "cross_attention_dim", "down_block_types",
        "downsample_padding", "encoder_hid_dim", "encoder_hid_dim_type", "flip_sin_to_cos", "freq_shift", "in_channels",
        "layers_per_block", "mid_block_scale_factor", "norm_eps", "norm_num_groups", "num_attention_heads",
        "num_class_embeds", "only_cross_attention", "projection_class_embeddings_input_dim", "resnet_time_scale_shift",
        "transformer_layers_per_block", "upcast_attention", "use_linear_projection",
    )
} | {
    "_class_name": "ControlNetModel", "conditioning_embedding_out_channels": [16, 32, 96, 256],
    "controlnet_conditioning_channel_order": "rgb", "global_pool_conditions": False, "conditioning_channels": 3,
}  # fmt: skip
_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL", "_diffusers_version": "0.20.0.dev0", "_name_or_path": "../sdxl-vae/",
    "act_fn": "silu", "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "force_upcast": True, "in_channels": 3, "latent_channels": 4, "layers_per_block": 2, "norm_num_groups": 32,
    "out_channels": 3, "sample_size": 1024, "scaling_factor": 0.13025, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "architectures": ["CLIPTextModel"], "attention_dropout": 0.0, "bos_token_id": 0, "dropout": 0.0, "eos_token_id": 2,
    "hidden_act": "quick_gelu", "hidden_size": 768, "initializer_factor": 1.0, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 77, "model_type": "clip_text_model",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "projection_dim": 768,
    "torch_dtype": "float16", "transformers_version": "4.32.0.dev0", "vocab_size": 49408,
}  # fmt: skip
_GENERATION: dict[str, Any] = {
    "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "do_sample": False, "early_stopping": False, "is_decoder": False,
    "is_encoder_decoder": False, "length_penalty": 1.0, "max_length": 20, "num_beams": 1, "output_attentions": False,
    "pruned_heads": {}, "return_dict": True, "tf_legacy_loss": False, "top_k": 50, "torchscript": False,
    "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
_VISION: dict[str, Any] = _GENERATION | {
    "attention_dropout": 0.0, "dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1280, "image_size": 224,
    "initializer_factor": 1.0, "initializer_range": 0.02, "intermediate_size": 5120, "layer_norm_eps": 1e-05,
    "model_type": "clip_vision_model", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 32,
    "patch_size": 14, "projection_dim": 1024,
}  # fmt: skip
# Model -> the class of a network, the family, and its entries.
PUBLISHED: dict[str, tuple[str, Family, dict[str, Any]]] = {
    "SDXL": ("UNet2DConditionModel", "sdxl", _SDXL_UNET),
    "SDXL's refiner": (
        "UNet2DConditionModel", "sdxl",
        _SDXL_UNET | {
            "attention_head_dim": [6, 12, 24, 24], "block_out_channels": [384, 768, 1536, 1536],
            "cross_attention_dim": 1280, "down_block_types": [_DOWN, _CROSS, _CROSS, _DOWN],
            "projection_class_embeddings_input_dim": 2560, "transformer_layers_per_block": 4,
            "up_block_types": [_UP, _UP_CROSS, _UP_CROSS, _UP], "upcast_attention": False,
        },
    ),
    "SDXL for inpainting": (
        "UNet2DConditionModel", "sdxl",
        _SDXL_UNET | {
            "in_channels": 9, "decay": 0.9999, "inv_gamma": 1.0, "min_decay": 0.0, "optimization_step": 37000,
            "power": 0.6667, "update_after_step": 0, "use_ema_warmup": False,
            "_name_or_path": "valhalla/sdxl-inpaint-ema", "attention_type": "default",
            "reverse_transformer_layers_per_block": None, "dropout": 0.0,
        },
    ),
    "SDXL of half the size": (
        "UNet2DConditionModel", "sdxl",
        _SDXL_UNET | {
            "mid_block_type": "UNetMidBlock2D", "transformer_layers_per_block": [0, 2, [4, 4]],
            "reverse_transformer_layers_per_block": [[4, 4, 10], [2, 1, 1], 1],
        },
    ),
    "1.5": ("UNet2DConditionModel", "sd", _SD_UNET),
    "2.1": (
        "UNet2DConditionModel", "sd",
        _SD_UNET | {
            "attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024, "dual_cross_attention": False,
            "num_class_embeds": None, "only_cross_attention": False, "sample_size": 96, "upcast_attention": True,
            "use_linear_projection": True,
        },
    ),
    "a ControlNet of SDXL": ("ControlNetModel", "sdxl", _CONTROLNET),
    "SDXL's VAE": ("AutoencoderKL", "sdxl", _VAE),
    "1.5's VAE": (
        "AutoencoderKL", "sd", {key: _VAE[key] for key in _VAE if key not in ("force_upcast", "scaling_factor")},
    ),
    "SDXL's first text encoder": ("CLIPTextModel", "sdxl", _TEXT),
    "SDXL's second text encoder": (
        "CLIPTextModelWithProjection", "sdxl",
        _TEXT | {
            "architectures": ["CLIPTextModelWithProjection"], "hidden_act": "gelu", "hidden_size": 1280,
            "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32, "projection_dim": 1280,
        },
    ),
    "a text encoder with options of generation": ("CLIPTextModel", "sd", _TEXT | _GENERATION | {"use_cache": True}),
    "an image encoder": ("CLIPVisionModelWithProjection", "sdxl", _VISION),
    "1.5's safety checker": (
        "StableDiffusionSafetyChecker", "sd",
        {
            "_name_or_path": "CompVis/stable-diffusion-safety-checker",
            "architectures": ["StableDiffusionSafetyChecker"], "initializer_factor": 1.0,
            "logit_scale_init_value": 2.6592, "model_type": "clip", "projection_dim": 768,
            "text_config": _TEXT | _GENERATION, "text_config_dict": {"hidden_size": 768}, "torch_dtype": "float32",
            "transformers_version": None, "vision_config": _VISION, "vision_config_dict": {"hidden_size": 1024},
        },
    ),
}  # fmt: skip
