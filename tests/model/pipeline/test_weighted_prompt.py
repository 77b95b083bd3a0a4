"""Weighted prompts: the grammar, chunks, and images against diffusers with embeddings from transformers.

The reference is another implementation: a recursive parser, transformers' tokenizers and text encoders, and NumPy.
"""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from engine_builder.building.eager_model import load_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import plan_request
from model.pipeline.text_to_image import generate
from model.prompts.weighted_prompt import parse_weights, weighted_chunks
from model.store.precision import FP32
from tests.support.images import largest_difference
from tests.support.parity import TOLERANCE, check_all_differ, image_of, params_of
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

LONG = "a large red circle on a blue background, " * 20


@pytest.fixture(scope="module")
def tokenizers() -> list[CLIPTokenizer]:
    return [CLIPTokenizer.from_pretrained(MODEL_FOLDER / name) for name in ("tokenizer", "tokenizer_2")]


def weights_of(text: str) -> list[tuple[str, float]]:
    return [(fragment, round(weight, 6)) for fragment, weight in parse_weights(text)]


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("a cat", [("a cat", 1.0)]),
        ("a (red) cat", [("a ", 1.0), ("red", 1.1), (" cat", 1.0)]),
        ("a [red] cat", [("a ", 1.0), ("red", 0.909091), (" cat", 1.0)]),
        ("a (red:1.3) cat", [("a ", 1.0), ("red", 1.3), (" cat", 1.0)]),
        ("(red: 0.5 )", [("red", 0.5)]),
        ("(red:-.5)", [("red", -0.5)]),
        ("(red:0)", [("red", 0.0)]),
        ("((red))", [("red", 1.21)]),
        ("(a (b:2) [c])", [("a ", 1.1), ("b", 2.2), (" ", 1.1), ("c", 1.0)]),
        (r"\(red\) \[x\] \\", [(r"(red) [x] " + "\\", 1.0)]),
        (r"(a\):1.5)", [("a)", 1.5)]),
        ("a:b, c:1.3", [("a:b, c:1.3", 1.0)]),
        ("(a:b:1.3)", [("a:b", 1.3)]),
        ("[a:1.3]", [("a:1.3", 0.909091)]),
        ("a) b] c", [("a) b] c", 1.0)]),
        ("a (b c", [("a ", 1.0), ("b c", 1.1)]),
        ("a [b c", [("a ", 1.0), ("b c", 0.909091)]),
        ("(a [b) c]", [("a ", 1.1), ("b", 1.0), (" c", 0.909091)]),
        ("(a:nan) (b:inf) (c:1e9)", [("a:nan", 1.1), (" ", 1.0), ("b:inf", 1.1), (" ", 1.0), ("c:1e9", 1.1)]),
        ("", [("", 1.0)]),
        ("()", [("", 1.0)]),
    ],
)
def test_grammar(text: str, fragments: list[tuple[str, float]]) -> None:
    assert weights_of(text) == fragments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a:1000000000)", '"a" has the weight 1e+09. Weights are -10 to 10'),
        ("(a:10.01)", '"a" has the weight 10.01'),
        ("(a:-11)", '"a" has the weight -11'),
        ("(a:" + "9" * 400 + ")", '"a" has the weight inf'),
        ("((a:0):" + "9" * 400 + ")", '"a" has the weight nan'),
        ("(" * 50 + "a" + ")" * 50, '"a" has the weight 117.4'),
        ("(" * 50 + "a", '"a" has the weight 117.4'),
        ("(" * 1000 + "a" + ")" * 1000, "more than 50 ( are open at once"),
        ("[a" * 2000, "more than 50 [ are open at once"),
        ("(:1.0" * 800, "more than 50 ( are open at once"),
        ("(a:1.2.3)", 'the weight "1.2.3" is not a number'),
        ("(a:....)", 'the weight "...." is not a number'),
    ],
)
def test_refuses_a_weight_by_value(text: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=re.escape(f"negative_prompt: {message}")) as refusal:
        parse_weights(text, "negative_prompt")
    assert refusal.value.field == "negative_prompt"


def test_parses_long_prompts() -> None:
    """Also texts for which a backtracking parser would take minutes."""
    texts = {"[a" * 50: "a" * 50, "([a])" * 800: "a" * 800, "(a:1)" * 800: "a" * 800, "\\" * 4000: "\\" * 2000}
    texts |= {text: text for text in (":" * 4000, ": " * 2000, "]" * 4000, ":1" * 2000)}
    for text, expected in texts.items():
        assert "".join(fragment for fragment, _ in parse_weights(text)) == expected


class Encoders:
    """The text encoders of a model folder in transformers, with chunks and weights in NumPy."""

    def __init__(self, folder: Path, tokenizers: list[CLIPTokenizer]) -> None:
        self._pairs = [
            (tokenizers[0], CLIPTextModel.from_pretrained(folder / "text_encoder")),
            (tokenizers[1], CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2")),
        ]

    @torch.inference_mode()
    def encode(self, text: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the embedding [77 * chunks, width] and the pooled text [width]."""
        states, pooled = [], None
        for tokenizer, network in self._pairs:
            ids, weights = [], []
            for fragment, weight in parse_weights(text):
                tokens = tokenizer(fragment, add_special_tokens=False).input_ids
                ids += tokens
                weights += [weight] * len(tokens)
            count = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4}[-(-len(ids) // 75)]
            of_encoder = []
            for chunk in range(count):
                part, own = ids[75 * chunk : 75 * chunk + 75], weights[75 * chunk : 75 * chunk + 75]
                padding = 75 - len(part)
                whole = [tokenizer.bos_token_id, *part, tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
                output = network(torch.tensor([whole]), output_hidden_states=True)
                factors = np.array([1.0, *own, 1.0, *[1.0] * padding], np.float32)
                of_encoder.append(output.hidden_states[-2][0].numpy() * factors[:, None])
                if chunk == 0:
                    pooled = getattr(output, "text_embeds", None)
            states.append(np.concatenate(of_encoder))
        assert pooled is not None
        return np.concatenate(states, axis=1), pooled[0].numpy()


@pytest.fixture(scope="module")
def encoders(tokenizers: list[CLIPTokenizer]) -> Encoders:
    return Encoders(MODEL_FOLDER, tokenizers)


def generate_with_diffusers(reference: Reference, encoders: Encoders, params: GenerationParams) -> np.ndarray[Any, Any]:
    """Return the image of diffusers' SDXL pipeline for embeddings of the reference."""
    positive, pooled = encoders.encode(params.prompt)
    if params.negative_prompt is None:
        negative, negative_pooled = np.zeros_like(positive), np.zeros_like(pooled)
    else:
        negative, negative_pooled = encoders.encode(params.negative_prompt)
    # diffusers takes texts of one length. Attention to repeated keys is attention to them once.
    longest = max(len(positive), len(negative))
    embeds = {
        "prompt_embeds": np.tile(positive, (longest // len(positive), 1)),
        "negative_prompt_embeds": np.tile(negative, (longest // len(negative), 1)),
        "pooled_prompt_embeds": pooled,
        "negative_pooled_prompt_embeds": negative_pooled,
    }
    return reference.generate_from(params, {name: torch.from_numpy(array)[None] for name, array in embeds.items()})


def weighted(loaded: Loaded, **fields: object) -> GenerationParams:
    return params_of(loaded, **{"prompt_syntax": "weighted", "num_inference_steps": 6} | fields)


PROMPTS: list[dict[str, object]] = [
    {"prompt": "a large red circle on a blue background"},
    {"prompt": "a (large:1.3) [red] circle on a ((blue)) background", "negative_prompt": "(green:0.5) square"},
    {"prompt": "a red (circle:-0.6) on blue"},
    {"prompt": LONG[:500] + "(a green square:1.2)", "negative_prompt": "a circle"},  # two chunks
    {"prompt": LONG[:800], "negative_prompt": "(dark)"},  # three chunks
    {"prompt": LONG[:1200] + "(a blue square:1.4)", "negative_prompt": None},  # four chunks
    {"prompt": "a red circle", "negative_prompt": LONG[:600]},
]


@pytest.mark.parametrize("fields", PROMPTS, ids=range(len(PROMPTS)))
def test_image_is_that_of_diffusers(
    fields: dict[str, object], loaded: Loaded, tiny_reference: Reference, encoders: Encoders
) -> None:
    params = weighted(loaded, **fields)
    [image], _, warnings = generate(loaded.model, [params])
    assert not warnings
    assert largest_difference(image, generate_with_diffusers(tiny_reference, encoders, params)) <= TOLERANCE


def test_each_prompt_gives_another_image(loaded: Loaded) -> None:
    """So the comparisons above can fail, and weights and later chunks have an effect."""
    params = weighted(loaded, prompt=LONG[:1200] + "a blue square")
    changed = [
        replace(params, prompt=LONG[:1200] + "(a blue square:1.4)"),
        replace(params, prompt=LONG[:1200]),
        replace(params, prompt="(" + LONG[:1200] + "a blue square)"),
        replace(params, negative_prompt=LONG[:600]),
        replace(params, prompt_syntax="plain"),
    ]
    check_all_differ(loaded.model, params, *changed)
    plain = weighted(loaded, prompt="a large red circle on a blue background", prompt_syntax="plain")
    assert np.array_equal(*(image_of(loaded.model, replace(plain, prompt_syntax=one)) for one in ("plain", "weighted")))


def test_image_is_the_same_in_a_batch_of_other_lengths(loaded: Loaded) -> None:
    scales = itertools.cycle((1.0, 5.0))
    batch = [weighted(loaded, **fields, guidance_scale=scale) for fields, scale in zip(PROMPTS, scales, strict=False)]
    for params, image in zip(batch, generate(loaded.model, batch)[0], strict=True):
        assert largest_difference(image, image_of(loaded.model, params)) <= 1


def test_number_of_chunks(loaded: Loaded) -> None:
    tokenizer = loaded.model.tokenizers["tokenizer"]
    settings = tokenizer.settings
    for words, chunks in {0: 1, 75: 1, 76: 2, 150: 2, 151: 4, 225: 4, 300: 4}.items():
        found = weighted_chunks(tokenizer, "red " * words, 4, "prompt")
        assert len(found.ids) == chunks and {len(ids) for ids in found.ids} == {77}, words
        assert found.weights is None and (found.dropped, found.dropped_tokens) == ("", 0)
        assert {(ids[0], settings.eos_token_id in ids) for ids in found.ids} == {(settings.bos_token_id, True)}


def test_warns_of_the_text_that_does_not_fit(loaded: Loaded) -> None:
    params = weighted(loaded, prompt="red " * 290 + "(circle:1.2) " + "blue " * 20, negative_prompt="a " * 76)
    plan = plan_request(loaded.model, params)
    [warning] = plan.warnings
    assert warning.startswith("prompt: the text encoders read 300 tokens; the last 11 were left out: 'blue blue")
    # plain: as before
    plain = plan_request(loaded.model, replace(params, prompt_syntax="plain")).warnings
    assert [text.partition(";")[0] for text in plain if "tokens" in text] == [
        f"{name}: the text encoders read 77 tokens" for name in ("prompt", "negative_prompt")
    ]
    assert [text for text in plain if "tokens" not in text][0].startswith("prompt: read as text, not as a weight")


@pytest.fixture(scope="module")
def toy(toy_folder: Path) -> LoadedModel:
    """The toy in eager PyTorch. An image of one step takes milliseconds."""
    return load_eager_model(Checkpoint(toy_folder), None, FP32, "cpu")[1]


def random_prompt(choose: random.Random) -> str:
    pieces = [
        "red", "a circle", "(", ")", "[", "]", ":", ":1.3)", ":1e9)", ":1000000000)", ":nan)", ":NaN)", ":-inf)", ":0)",
        ":1.2.3)", "\\", "\\(", "\\]", "((", "))", "[[", ":-3)", " ", ",", "\n", "\u00e9", "\u6f22", "\U0001f600",
        "(" * 1000, ")" * 1000, "[" * 1000, "]" * 1000, "BREAK", "red " * 90, ":.)", ":+1)", ":\u0661)",
    ]  # fmt: skip
    return "a" + "".join(choose.choice(pieces) for _ in range(choose.randint(1, 25)))


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_every_prompt_is_refused_or_gives_an_image(count: int, toy: LoadedModel, loaded: Loaded) -> None:
    choose = random.Random(0)
    plain = weighted(loaded, width=64, height=64, num_inference_steps=1)
    refused = 0
    for _ in range(count):
        negative = random_prompt(choose)[:4000] if choose.random() < 0.3 else None
        try:
            image = image_of(toy, replace(plain, prompt=random_prompt(choose)[:4000], negative_prompt=negative))
        except RequestRefused as error:
            assert error.field in ("prompt", "negative_prompt")
            refused += 1
        else:
            assert image.shape == (64, 64, 3)
    assert count // 10 < refused < count - count // 10
