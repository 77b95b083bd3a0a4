"""The tensors that each network of a pipeline takes and returns. Imports no torch.

Shapes are symbolic in the batch ("rows", the manifest's word for it) and in pixels ("height/8" is a latent's side).
"""

from dataclasses import dataclass, replace

from model.store.manifest import Signature, TensorSpec
from model.store.precision import Dtype

TEXT_EMBEDS = "text_embeds"  # the pooled text, as diffusers calls it
LORA_DOWN, LORA_UP = "lora_down", "lora_up"  # the factors of adapters, see `model.adapters.packing`
TIME_IDS = "time_ids"  # original size, crop and target size, as diffusers calls them
TIMESTEP_COND = "timestep_cond"  # the embedded guidance scale, as diffusers calls it
CONTROL = "control"  # a ControlNet's embedding of the control image
CONTROL_TYPE = "control_type"  # which of a Union network's types the control image is: 1 there, otherwise 0
IMAGE_FEATURES = "features"  # of a reference image, by the image encoder of an IP-Adapter
IMAGE_KEYS, IMAGE_VALUES = "image_keys", "image_values"  # of the tokens of reference images
# Added to the attention's scores of these tokens: 0, and a large negative number for an unused one.
IMAGE_BIAS = "image_bias"
CONTROL_SCALE = "scale"  # what a ControlNet's outputs are multiplied by, as diffusers' controlnet_conditioning_scale
KEYS_VALUES = "keys_values"  # of the cross-attentions, for each token of a text
TOKENS = "tokens"  # the symbol of their number, in engines that take any
TEXT_CHUNK_COUNTS = (1, 2, 4)  # of a prompt. Each divides the next, see `model.denoising.inputs.repeat_tokens`
CLIP_SKIP = "clip_skip"  # which hidden states a text encoder returns


@dataclass(frozen=True)
class TextEncoderWidths:
    """The sizes of a text encoder. layers: 0: it takes no clip_skip."""

    tokens: int
    width: int
    pooled_width: int = 0
    layers: int = 0


@dataclass(frozen=True)
class VaeWidths:
    """The sizes of a VAE. scale: pixels on a side of a latent."""

    latent_channels: int
    scale: int

    @property
    def latents(self) -> tuple[str | int, ...]:
        """Shape of latents."""
        return ("rows", self.latent_channels, f"height/{self.scale}", f"width/{self.scale}")


@dataclass(frozen=True)
class UnetWidths:
    """The sizes of a UNet or a ControlNet, whose latents have the sizes of `vae`."""

    vae: VaeWidths
    tokens: int
    context_width: int  # of the text embeddings: the sum of the text encoders' widths
    pooled_width: int = 0  # 0: it takes no pooled text and no sizes
    time_ids: int = 0
    timestep_cond: int = 0  # 0: it does not embed the guidance scale
    extra_channels: int = 0  # that it takes after the latents: a mask and masked latents
    chunks: int | None = 1  # of text that it reads; None: any number
    time_embeds_width: int = 0  # this and the following ones are set once the network is read
    keys_values_width: int = 0  # 0: no attention to the text
    lora_down: int = 1  # with low-rank inputs
    lora_up: int = 1
    residuals: tuple[tuple[int, int], ...] = ()  # of a ControlNet: channels, and pixels for each element's side
    control_types: int = 0  # of a Union network
    image_slots: tuple[int, int] = (1, 1)  # the most IP-Adapters, and the most tokens of each

    @property
    def all_tokens(self) -> int | str:
        """The number of tokens whose keys and values are read, or its symbol."""
        return TOKENS if self.chunks is None else self.chunks * self.tokens


@dataclass(frozen=True)
class ImageEncoderWidths:
    """The sizes of an IP-Adapter's image encoder."""

    side: int  # pixels of the square that it takes
    features: tuple[int, ...]  # its output of an image, (width,) or (tokens, width)


@dataclass(frozen=True)
class IpAdapterWidths:
    """The sizes of an IP-Adapter. tokens: that it makes of an image. keys_values_width: of its UNet."""

    features: tuple[int, ...]
    tokens: int
    keys_values_width: int


@dataclass(frozen=True)
class SafetyCheckerWidths:
    """The sizes of a safety checker. side: pixels of the square that it takes."""

    side: int
    concepts: int
    special_concepts: int


def text_signature(widths: TextEncoderWidths, dtype: Dtype) -> Signature:
    """input_ids [batch, tokens] -> the hidden states that the UNet reads [batch, tokens, width].

    clip_skip [batch, layers] is one-hot. A 1 in column k selects the states k layers before the layer that the
    UNet was trained with.
    """
    return Signature(
        inputs=_text_inputs(widths.tokens, widths.layers),
        outputs=(TensorSpec(name="hidden_states", dtype=dtype, shape=("rows", widths.tokens, widths.width)),),
    )


def pooled_text_signature(widths: TextEncoderWidths, dtype: Dtype) -> Signature:
    """input_ids [batch, tokens] -> penultimate hidden states, and the pooled projection [batch, width].

    clip_skip: see `text_signature`. It does not change the pooled projection.
    """
    return Signature(
        inputs=_text_inputs(widths.tokens, widths.layers),
        outputs=(
            TensorSpec(name="hidden_states", dtype=dtype, shape=("rows", widths.tokens, widths.width)),
            TensorSpec(name="pooled", dtype=dtype, shape=("rows", widths.pooled_width)),
        ),
    )


def _text_inputs(tokens: int, layers: int) -> tuple[TensorSpec, ...]:
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("rows", tokens))
    return (ids, TensorSpec(name=CLIP_SKIP, dtype="int64", shape=("rows", layers))) if layers else (ids,)


def text_chunks(signature: Signature, tokens: int) -> int:
    """Return the most chunks of `tokens` tokens that a network reads."""
    counts = [spec.shape[1] for spec in signature.inputs if spec.name == KEYS_VALUES]
    return min((count // tokens for count in counts if isinstance(count, int)), default=TEXT_CHUNK_COUNTS[-1])


def clip_skip_columns(signature: Signature) -> int:
    """Return the number of values of clip_skip that a text encoder takes, 0 for an encoder without it."""
    return next((int(spec.shape[1]) for spec in signature.inputs if spec.name == CLIP_SKIP), 0)


def unet_text_signature(widths: UnetWidths, dtype: Dtype) -> Signature:
    """Text embeddings -> keys and values of all cross-attentions of a UNet, computed once for each prompt."""
    text, width = ("rows", widths.tokens, widths.context_width), widths.keys_values_width
    return Signature(
        inputs=(TensorSpec(name="encoder_hidden_states", dtype=dtype, shape=text),),
        outputs=(TensorSpec(name=KEYS_VALUES, dtype=dtype, shape=("rows", widths.tokens, width)),),
    )


def unet_time_signature(widths: UnetWidths, dtype: Dtype) -> Signature:
    """Timestep, and for SDXL pooled text and sizes -> the embeddings that each ResNet block of a UNet adds.

    The batch is the number of timesteps: all steps of a request are computed at once. A UNet that embeds the guidance
    scale has it as a further input (`UnetWidths.timestep_cond`).
    """
    inputs = [TensorSpec(name="timestep", dtype="float32", shape=("rows",))]
    if widths.pooled_width:
        inputs.append(TensorSpec(name=TEXT_EMBEDS, dtype=dtype, shape=("rows", widths.pooled_width)))
        inputs.append(TensorSpec(name=TIME_IDS, dtype="float32", shape=("rows", widths.time_ids)))
    if widths.timestep_cond:
        inputs.append(TensorSpec(name=TIMESTEP_COND, dtype=dtype, shape=("rows", widths.timestep_cond)))
    embeds = TensorSpec(name="time_embeds", dtype=dtype, shape=("rows", widths.time_embeds_width))
    return Signature(inputs=tuple(inputs), outputs=(embeds,))


def timestep_cond_width(signature: Signature) -> int:
    """Return the width of the embedded guidance scale that a time network takes, 0 for a network without it."""
    return next((int(spec.shape[1]) for spec in signature.inputs if spec.name == TIMESTEP_COND), 0)


def unet_signature(widths: UnetWidths, dtype: Dtype) -> Signature:
    """Latents with their time embeddings, keys and values -> the predicted noise, of the latents' shape.

    A UNet that was trained for inpainting takes further channels after the latents (`UnetWidths.extra_channels`).
    """
    batch, _, *sides = widths.vae.latents
    sample = (batch, widths.vae.latent_channels + widths.extra_channels, *sides)
    return Signature(
        inputs=(
            TensorSpec(name="sample", dtype=dtype, shape=sample),
            TensorSpec(name="time_embeds", dtype=dtype, shape=("rows", widths.time_embeds_width)),
            TensorSpec(name=KEYS_VALUES, dtype=dtype, shape=("rows", widths.all_tokens, widths.keys_values_width)),
        ),
        outputs=(TensorSpec(name="noise", dtype=dtype, shape=widths.vae.latents),),
    )


def low_rank_inputs(widths: UnetWidths, dtype: Dtype) -> tuple[TensorSpec, ...]:
    """Return the inputs of a UNet for the low-rank factors of all linears."""
    factors = ((LORA_DOWN, widths.lora_down), (LORA_UP, widths.lora_up))
    return tuple(TensorSpec(name=name, dtype=dtype, shape=("rows", width)) for name, width in factors)


def image_prompt_inputs(widths: UnetWidths, dtype: Dtype) -> tuple[TensorSpec, ...]:
    """Return the inputs of a UNet for reference images.

    Keys and values are [batch, adapters, tokens, width], the bias [batch, adapters, tokens].
    """
    shape = ("rows", *widths.image_slots)
    bias = TensorSpec(name=IMAGE_BIAS, dtype="float32", shape=shape)
    return (*_image_keys_values(widths.keys_values_width, dtype, shape), bias)


def image_encoder_signature(widths: ImageEncoderWidths, dtype: Dtype) -> Signature:
    """Normalized pixels of a square, [batch, 3, side, side] -> features [batch, width] or [batch, tokens, width]."""
    pixels = TensorSpec(name="pixels", dtype=dtype, shape=("rows", 3, widths.side, widths.side))
    return Signature(inputs=(pixels,), outputs=(_image_features(widths.features, dtype),))


def ip_adapter_signature(widths: IpAdapterWidths, dtype: Dtype) -> Signature:
    """Features of an image -> keys and values of its tokens in all cross-attentions, [batch, tokens, width] each."""
    outputs = _image_keys_values(widths.keys_values_width, dtype, ("rows", widths.tokens))
    return Signature(inputs=(_image_features(widths.features, dtype),), outputs=outputs)


def _image_features(features: tuple[int, ...], dtype: Dtype) -> TensorSpec:
    return TensorSpec(name=IMAGE_FEATURES, dtype=dtype, shape=("rows", *features))


def _image_keys_values(
    keys_values_width: int, dtype: Dtype, shape: tuple[str | int, ...]
) -> tuple[TensorSpec, TensorSpec]:
    width = max(1, keys_values_width // 2)
    keys, values = (TensorSpec(name=name, dtype=dtype, shape=(*shape, width)) for name in (IMAGE_KEYS, IMAGE_VALUES))
    return keys, values


def controlnet_signature(widths: UnetWidths, dtype: Dtype) -> Signature:
    """Latents with their time embeddings, keys and values, and the control image's embedding -> scaled residuals.

    A network without attention to the text has no keys and values.
    """
    inputs = [
        TensorSpec(name="sample", dtype=dtype, shape=widths.vae.latents),
        TensorSpec(name="time_embeds", dtype=dtype, shape=("rows", widths.time_embeds_width)),
    ]
    if widths.keys_values_width:
        shape = ("rows", widths.all_tokens, widths.keys_values_width)
        inputs.append(TensorSpec(name=KEYS_VALUES, dtype=dtype, shape=shape))
    inputs += [_control(widths, dtype), TensorSpec(name=CONTROL_SCALE, dtype="float32", shape=("rows", 1))]
    return Signature(inputs=tuple(inputs), outputs=residual_inputs(widths, dtype))


def controlnet_time_signature(widths: UnetWidths, dtype: Dtype) -> Signature:
    """Return the signature of a UNet's time network, without the guidance scale.

    A Union network also embeds the type of the control image.
    """
    inputs = unet_time_signature(replace(widths, timestep_cond=0), dtype)
    return Signature(inputs=(*inputs.inputs, *_control_type(widths)), outputs=inputs.outputs)


def controlnet_image_signature(widths: UnetWidths, dtype: Dtype) -> Signature:
    """Control image in [0, 1], [batch, 3, height, width] -> its embedding, of a latent's height and width."""
    pixels = TensorSpec(name="pixels", dtype=dtype, shape=("rows", 3, "height", "width"))
    return Signature(inputs=(pixels, *_control_type(widths)), outputs=(_control(widths, dtype),))


def residual_inputs(widths: UnetWidths, dtype: Dtype) -> tuple[TensorSpec, ...]:
    """Return the outputs of a ControlNet, which a UNet adds: of each skip connection in order, then of the middle."""
    last = len(widths.residuals) - 1
    return tuple(
        TensorSpec(
            name="residual_mid" if index == last else f"residual_{index}",
            dtype=dtype,
            shape=("rows", channels, f"height/{pixels}", f"width/{pixels}"),
        )
        for index, (channels, pixels) in enumerate(widths.residuals)
    )


def _control(widths: UnetWidths, dtype: Dtype) -> TensorSpec:
    batch, _, *sides = widths.vae.latents
    return TensorSpec(name=CONTROL, dtype=dtype, shape=(batch, widths.residuals[0][0], *sides))


def _control_type(widths: UnetWidths) -> tuple[TensorSpec, ...]:
    spec = TensorSpec(name=CONTROL_TYPE, dtype="float32", shape=("rows", widths.control_types or 1))
    return (spec,) if widths.control_types else ()


def residuals_of(signature: Signature) -> tuple[TensorSpec, ...]:
    """Return the inputs of a UNet that ControlNets compute."""
    return tuple(spec for spec in signature.inputs if spec.name.startswith("residual_"))


def image_slots(unet: Signature) -> tuple[int, int]:
    """Return the most IP-Adapters of a UNet, and the most tokens of each."""
    [bias] = (spec for spec in unet.inputs if spec.name == IMAGE_BIAS)
    return int(bias.shape[1]), int(bias.shape[2])


def control_input(controlnet: str, name: str) -> str:
    """Return the name that an input of a ControlNet has in an image's conditioning."""
    return f"{controlnet}.{name}"


def control_types(time: Signature) -> int:
    """Return the number of types that a ControlNet's time network embeds: 0 unless it is a Union network's."""
    return next((int(spec.shape[1]) for spec in time.inputs if spec.name == CONTROL_TYPE), 0)


def vae_encoder_signature(widths: VaeWidths, dtype: Dtype) -> Signature:
    """Pixels in [-1, 1], [batch, 3, height, width] -> mean and log variance of the latents, one after the other."""
    moments = (widths.latents[0], 2 * widths.latent_channels, *widths.latents[2:])
    return Signature(
        inputs=(TensorSpec(name="pixels", dtype=dtype, shape=("rows", 3, "height", "width")),),
        outputs=(TensorSpec(name="moments", dtype=dtype, shape=moments),),
    )


def vae_decoder_signature(widths: VaeWidths, dtype: Dtype) -> Signature:
    """Latents divided by the scaling factor -> pixels in [-1, 1], [batch, 3, height, width]."""
    return Signature(
        inputs=(TensorSpec(name="latents", dtype=dtype, shape=widths.latents),),
        outputs=(TensorSpec(name="pixels", dtype=dtype, shape=("rows", 3, "height", "width")),),
    )


def safety_checker_signature(widths: SafetyCheckerWidths, dtype: Dtype) -> Signature:
    """pixel_values [batch, 3, side, side] -> scores of special concepts and of the others, each [batch, concepts]."""
    pixels = TensorSpec(name="pixel_values", dtype=dtype, shape=("rows", 3, widths.side, widths.side))
    outputs = [("special_scores", widths.special_concepts), ("concept_scores", widths.concepts)]
    return Signature(
        inputs=(pixels,),
        outputs=tuple(TensorSpec(name=name, dtype="float32", shape=("rows", count)) for name, count in outputs),
    )
