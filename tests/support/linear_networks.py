"""An SDXL of linear networks that run in microseconds, record their inputs, and fail on request."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine_builder.building.eager_engine import ANY_BUCKET
from model.denoising.noise_schedule import NoiseSchedule
from model.engines import shapes
from model.engines.engine import EngineSet
from model.engines.signatures import TextEncoderWidths, UnetWidths, VaeWidths
from model.pipeline.components import FAMILIES
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.prompts.tokenizer import Piece
from model.store.manifest import ModelFacts, RefinerFacts, Signature

TEXT_WIDTH = 4
WIDTHS = UnetWidths(
    VaeWidths(latent_channels=4, scale=8), tokens=5, pooled_width=3, context_width=2 * TEXT_WIDTH, time_ids=6,
    time_embeds_width=7, keys_values_width=4 * TEXT_WIDTH,
)  # fmt: skip
REFINER_WIDTHS = replace(
    WIDTHS, context_width=TEXT_WIDTH, time_ids=5, time_embeds_width=6, keys_values_width=2 * TEXT_WIDTH
)
SCHEDULE = NoiseSchedule(1000, 0.00085, 0.012, "scaled_linear", "leading", 1, False)


class WordTokenizer:
    """A tokenizer of whole words. The id of a word is its length."""

    class settings:
        max_length = WIDTHS.tokens
        bos_token_id = eos_token_id = pad_token_id = 0

    def pieces(self, text: str) -> list[Piece]:
        return [Piece((len(word[0]),), *word.span(), False) for word in re.finditer(r"\S+", text)]


@dataclass
class Stub:
    """An engine that records its inputs.

    Hidden states are the token ids, the noise is half the latents and a little conditioning, pixels are the latents.
    The mean of an image's latents is a mean of pixels, and their deviation 1.
    """

    component: str
    signature: Signature

    def __post_init__(self) -> None:
        self.bucket = ANY_BUCKET
        self.seen: list[dict[str, torch.Tensor]] = []  # inputs of each run
        self.poison: tuple[int, float] | None = None  # number of a run, and the value (nan, inf) in its output
        self.fails: Exception | None = None  # raised by every run while it is set

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.fails is not None:
            raise self.fails
        shapes.bind_shapes(self.signature, inputs, self.component)
        self.seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        outputs = self.outputs(inputs)
        if self.poison is not None and len(self.seen) - 1 == self.poison[0]:
            next(iter(outputs.values())).flatten()[0] = self.poison[1]
        return outputs

    def outputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "input_ids" in inputs:
            ids = inputs["input_ids"].float()
            hidden = ids[:, :, None].expand(-1, -1, TEXT_WIDTH).clone()
            return {"hidden_states": hidden, "pooled": ids[:, 1 : 1 + WIDTHS.pooled_width].clone()}
        if "encoder_hidden_states" in inputs:
            return {"keys_values": inputs["encoder_hidden_states"].repeat(1, 1, 2)}
        if "timestep" in inputs:
            return {"time_embeds": torch.cat([inputs["timestep"][:, None], inputs["time_ids"]], dim=1)}
        if "pixels" in inputs:
            mean = torch.nn.functional.avg_pool2d(inputs["pixels"], 8)
            return {"moments": torch.cat([mean, mean[:, :1], torch.zeros_like(mean), torch.zeros_like(mean[:, :1])], 1)}
        if "sample" in inputs:
            conditioning = inputs["keys_values"].mean((1, 2)) + 1e-3 * inputs["time_embeds"].mean(1)
            return {"noise": 0.5 * inputs["sample"] + 0.01 * conditioning.reshape(-1, 1, 1, 1)}
        return {"pixels": torch.nn.functional.interpolate(inputs["latents"][:, :3], scale_factor=8)}


def linear_model() -> LoadedModel:
    """Return a model of these networks, with a refiner. Its native size is 64x64."""
    text = TextEncoderWidths(WIDTHS.tokens, TEXT_WIDTH, WIDTHS.pooled_width)
    widths = {"unet": WIDTHS, "vae": WIDTHS.vae, "text_encoder": text, "text_encoder_2": text}
    refiner = widths | {"unet": REFINER_WIDTHS}
    signatures = {
        name: one.signature((refiner if one.part == "refiner" else widths)[one.checkpoint_folder], "float32")
        for name, one in FAMILIES["sdxl"].components.items()
    }
    return LoadedModel(
        engines={name: EngineSet([Stub(name, signature)]) for name, signature in signatures.items()},
        tokenizers={"tokenizer": WordTokenizer(), "tokenizer_2": WordTokenizer()},  # type: ignore[dict-item]
        noise_schedules={"base": SCHEDULE, "refiner": SCHEDULE},
        settings=ModelFacts(
            native_height=64,
            native_width=64,
            vae_scale_factor=8,
            vae_scaling_factor=0.5,
            latent_channels=4,
            force_zeros_for_empty_prompt=True,
            refiner=RefinerFacts(force_zeros_for_empty_prompt=False, requires_aesthetics_score=True),
        ),
        device=torch.device("cpu"),
        family=FAMILIES["sdxl"],
    )


def stub(model: LoadedModel, component: str) -> Stub:
    """Return the stub engine of a component."""
    engine = model.engines[component].engines[0]
    assert isinstance(engine, Stub)
    return engine


PLAIN = GenerationParams(
    prompt="one two three", negative_prompt=None, width=96, height=64, num_inference_steps=4, guidance_scale=7.5,
    guidance_end=1.0, scheduler="Euler", use_refiner=False, denoising_frac=0.5, seed=3, num_images=1,
    output_format="png", quality=95,
)  # fmt: skip
