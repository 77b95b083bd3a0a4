"""The loop itself, on networks of a line: what it asks of them, in which order, and what it does with nonsense."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from model import components
from model.components import Widths
from model.engines import EngineSet
from model.engines.eager import ANY_BUCKET
from model.errors import BrokenImage
from model.loading import Loaded
from model.pipeline import LoadedModel, generate, guidance_by_step
from model.request import GenerationSettings
from model.schedule import NoiseSchedule
from model.store.manifest import RefinerSettings, Settings, Signature

TEXT_WIDTH = 4
WIDTHS = Widths(
    tokens=5, text_width=TEXT_WIDTH, text_width_2=TEXT_WIDTH, pooled_width=3, latent_channels=4, time_ids=6, vae_scale=8
)
SCHEDULE = NoiseSchedule(1000, 0.00085, 0.012, "scaled_linear", "leading", 1, False)


class Words:
    """A tokenizer of whole words: each word's length is its id."""

    class settings:
        max_length = WIDTHS.tokens

    def encode(self, text: str) -> tuple[list[int], int]:
        ids = [len(word) for word in text.split()]
        return (ids + [0] * WIDTHS.tokens)[: WIDTHS.tokens], max(0, len(ids) - WIDTHS.tokens)

    def dropped_text(self, text: str) -> str:
        return " ".join(text.split()[WIDTHS.tokens :])


@dataclass
class Stub:
    """An engine that remembers its inputs. Text is its ids, noise a share of the latents, pixels the latents."""

    component: str
    signature: Signature

    def __post_init__(self) -> None:
        self.bucket = ANY_BUCKET
        self.seen: list[dict[str, torch.Tensor]] = []
        self.poison: tuple[int, float] | None = None  # (call, value) of an output that is no number

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        components.solve(self.signature, inputs, self.component)
        self.seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        outputs = self._outputs(inputs)
        if self.poison is not None and len(self.seen) - 1 == self.poison[0]:
            next(iter(outputs.values())).flatten()[0] = self.poison[1]
        return outputs

    def _outputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "input_ids" in inputs:
            ids = inputs["input_ids"].float()
            hidden = ids[:, :, None].expand(-1, -1, TEXT_WIDTH).clone()
            return {"hidden_states": hidden, "pooled": ids[:, : WIDTHS.pooled_width].clone()}
        if "sample" in inputs:
            return {"noise": 0.5 * inputs["sample"] + 0.01 * inputs["encoder_hidden_states"].mean()}
        large = torch.nn.functional.interpolate(inputs["latents"][:, :3], scale_factor=8)
        return {"pixels": large.clone()}


@pytest.fixture
def model() -> LoadedModel:
    context = 2 * TEXT_WIDTH
    signatures = {
        components.TEXT_ENCODER: components.text_signature(TEXT_WIDTH, WIDTHS.tokens, "float32", None),
        components.TEXT_ENCODER_2: components.text_signature(TEXT_WIDTH, WIDTHS.tokens, "float32", 3),
        components.REFINER_TEXT_ENCODER_2: components.text_signature(TEXT_WIDTH, WIDTHS.tokens, "float32", 3),
        components.UNET: components.unet_signature(WIDTHS, context, "float32"),
        components.REFINER_UNET: components.unet_signature(replace(WIDTHS, time_ids=5), TEXT_WIDTH, "float32"),
        components.VAE_DECODER: components.vae_decoder_signature(4, 8, "float32"),
    }
    return LoadedModel(
        engines={name: EngineSet([Stub(name, signature)]) for name, signature in signatures.items()},
        tokenizers={"tokenizer": Words(), "tokenizer_2": Words()},  # type: ignore[dict-item]
        noise_schedules={"base": SCHEDULE, "refiner": SCHEDULE},
        settings=Settings(
            native_height=64,
            native_width=64,
            vae_scale_factor=8,
            vae_scaling_factor=0.5,
            latent_channels=4,
            force_zeros_for_empty_prompt=True,
            refiner=RefinerSettings(force_zeros_for_empty_prompt=False, requires_aesthetics_score=True),
        ),
        device=torch.device("cpu"),
    )


def stub(model: LoadedModel, component: str) -> Stub:
    engine = model.engines[component].engines[0]
    assert isinstance(engine, Stub)
    return engine


PLAIN = GenerationSettings(
    prompt="one two three", negative_prompt=None, width=96, height=64, num_inference_steps=4, guidance_scale=7.5,
    end_cfg_frac=1.0, scheduler="Euler", use_refiner=False, denoising_frac=0.5, seed=3, num_images=1,
    output_format="png", quality=95,
)  # fmt: skip


@pytest.mark.parametrize(
    "scale, fraction, steps, expected",
    [
        (7.5, 1.0, 4, [7.5, 7.5, 7.5, 7.5]),
        (7.5, 0.5, 4, [7.5, 7.5, 1, 1]),
        (7.5, 0.0, 2, [1, 1]),
        (0.0, 1.0, 2, [1, 1]),
        (1.0, 1.0, 2, [1, 1]),
        (2.0, 0.4, 10, [2] * 4 + [1] * 6),
        (2.0, 0.5, 3, [2, 2, 1]),
    ],
)
def test_guidance_of_each_step(scale: float, fraction: float, steps: int, expected: list[float]) -> None:
    settings = replace(PLAIN, guidance_scale=scale, end_cfg_frac=fraction, num_inference_steps=steps)
    assert guidance_by_step(settings).tolist() == expected


def rows_of(model: LoadedModel, component: str) -> list[int]:
    return [len(inputs["timestep"]) for inputs in stub(model, component).seen]


def test_a_guided_image_takes_two_rows_and_an_unguided_one_takes_one(model: LoadedModel) -> None:
    batch = [
        replace(PLAIN, num_inference_steps=2),
        replace(PLAIN, num_inference_steps=4, guidance_scale=1.0),
        replace(PLAIN, num_inference_steps=4, end_cfg_frac=0.75, num_images=2),
    ]
    pictures, _, _ = generate(model, batch)
    assert len(pictures) == 4
    # 2 guided + 1 + 4 guided; then without the finished one; then without guidance.
    assert rows_of(model, components.UNET) == [7, 7, 5, 3]
    assert stub(model, components.REFINER_UNET).seen == []


def test_each_row_has_its_own_text_size_and_timestep(model: LoadedModel) -> None:
    batch = [
        replace(PLAIN, negative_prompt="four"),
        replace(PLAIN, prompt="sixsix", guidance_scale=1.0, num_inference_steps=2),
    ]
    generate(model, batch)
    first = stub(model, components.UNET).seen[0]
    assert first["encoder_hidden_states"][:, 0, 0].tolist() == [4.0, 3.0, 6.0]
    assert first["text_embeds"][:, 0].tolist() == [4.0, 3.0, 6.0]
    assert first["time_ids"].tolist() == [[64, 96, 0, 0, 64, 96]] * 3
    assert first["timestep"].tolist() == [751.0, 751.0, 501.0]
    assert torch.equal(first["sample"][0], first["sample"][1])


@pytest.mark.parametrize("negative, value", [(None, 0.0), ("", 0.0), ("four", 4.0)])
def test_a_missing_negative_prompt_is_zeros_and_an_empty_one_is_read(
    negative: str | None, value: float, model: LoadedModel
) -> None:
    generate(model, [replace(PLAIN, negative_prompt=negative)])
    assert stub(model, components.UNET).seen[0]["encoder_hidden_states"][0, 0, 0] == value
    texts = len(stub(model, components.TEXT_ENCODER).seen[0]["input_ids"])
    assert texts == (1 if negative is None else 2)


def test_the_refiner_takes_over_with_its_own_text_and_score(model: LoadedModel) -> None:
    generate(model, [replace(PLAIN, use_refiner=True), replace(PLAIN, seed=9)])
    assert rows_of(model, components.UNET) == [4, 4, 2, 2]
    assert rows_of(model, components.REFINER_UNET) == [2, 2]
    refined = stub(model, components.REFINER_UNET).seen[0]
    assert refined["time_ids"].tolist() == [[64, 96, 0, 0, 2.5], [64, 96, 0, 0, 6.0]]
    assert refined["encoder_hidden_states"].shape == (2, WIDTHS.tokens, TEXT_WIDTH)
    assert refined["timestep"].tolist() == [251.0, 251.0]
    # This refiner does not force zeros: a missing negative prompt is read as an empty one.
    assert len(stub(model, components.REFINER_TEXT_ENCODER_2).seen[0]["input_ids"]) == 2


def test_a_shared_text_encoder_is_used_for_both(model: LoadedModel) -> None:
    model.shares_text_encoder_2 = True
    generate(model, [replace(PLAIN, use_refiner=True)])
    assert stub(model, components.REFINER_TEXT_ENCODER_2).seen == []
    assert len(stub(model, components.TEXT_ENCODER_2).seen) >= 1


def test_latents_are_the_seed_s_and_scaled_for_the_decoder(model: LoadedModel) -> None:
    generate(model, [replace(PLAIN, seed=5, num_images=2)])
    first = stub(model, components.UNET).seen[0]["sample"]
    for image, seed in enumerate((5, 6)):
        noise = torch.randn((1, 4, 8, 12), generator=torch.Generator("cpu").manual_seed(seed))
        ratio = first[2 + image] / noise[0]
        torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio.mean())))
    decoded = [inputs["latents"] for inputs in stub(model, components.VAE_DECODER).seen]
    assert [list(latents.shape) for latents in decoded] == [[1, 4, 8, 12]] * 2


def test_progress_is_told_step_by_step(model: LoadedModel) -> None:
    told: list[tuple[int, int]] = []
    generate(model, [PLAIN, replace(PLAIN, num_inference_steps=2)], lambda done, steps: told.append((done, steps)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_every_stage_is_timed(model: LoadedModel) -> None:
    _, timings, _ = generate(model, [replace(PLAIN, use_refiner=True)])
    assert list(timings) == ["text", "denoise", "refine", "decode"]
    assert all(milliseconds > 0 for milliseconds in timings.values())
    assert "refine" not in generate(model, [PLAIN])[1]


def test_a_prompt_that_is_cut_is_said(model: LoadedModel) -> None:
    _, _, warnings = generate(model, [replace(PLAIN, prompt="a b c d e and more", negative_prompt="a b c d e too")])
    assert warnings == [
        "prompt: the encoders read 5 tokens; the last 2 were left out: 'and more'",
        "negative_prompt: the encoders read 5 tokens; the last 1 were left out: 'too'",
    ]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "component, call",
    [
        (components.TEXT_ENCODER_2, 0),
        (components.UNET, 0),
        (components.UNET, 3),
        (components.VAE_DECODER, 0),
    ],
)
def test_what_is_not_a_number_is_no_picture(component: str, call: int, poison: float, model: LoadedModel) -> None:
    stub(model, component).poison = (call, poison)
    with pytest.raises(BrokenImage, match="NaN or infinite"):
        generate(model, [PLAIN])


def test_the_image_that_is_broken_is_named(model: LoadedModel) -> None:
    stub(model, components.VAE_DECODER).poison = (1, float("nan"))
    with pytest.raises(BrokenImage, match=r"image 1 of 3 \(counted from 0\)"):
        generate(model, [replace(PLAIN, num_images=3)])


def test_a_broken_run_leaves_nothing_behind(model: LoadedModel) -> None:
    expected = generate(model, [PLAIN])[0][0]
    unet = stub(model, components.UNET)
    unet.poison = (len(unet.seen), float("nan"))
    with pytest.raises(BrokenImage):
        generate(model, [PLAIN])
    assert np.array_equal(generate(model, [PLAIN])[0][0], expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("component, tensor", [("unet", "conv_out.bias"), ("vae_decoder", "decoder.conv_out.bias")])
def test_weights_that_are_not_numbers_draw_no_picture(
    component: str, tensor: str, poison: float, loaded: Loaded
) -> None:
    """The compiled engines, too, hand nonsense on instead of hiding it."""
    [engine] = loaded.model.engines[component].engines
    # Mapped from the store's file for this process alone: the file stays as it is.
    weights = {name.removeprefix("network."): value for name, value in engine._weights.items()}  # type: ignore[attr-defined]
    value = weights[tensor][0].item()
    settings = replace(PLAIN, prompt="a circle")
    try:
        weights[tensor][0] = poison
        with pytest.raises(BrokenImage):
            generate(loaded.model, [settings])
    finally:
        weights[tensor][0] = value
    assert generate(loaded.model, [settings])[0][0].shape == (64, 96, 3)
