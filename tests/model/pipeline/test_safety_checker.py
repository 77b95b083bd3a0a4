"""The safety checker decides like diffusers', and the answers say so."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.safety_checker import find_safety_checker
from engine_builder.networks.network import load_network
from engine_builder.networks.network_check import check_model
from engine_builder.stores.store import WritableStore
from model.errors import MissingComponent
from model.images.clip_input import DEVIATION, clip_input
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.target import Target
from model.pipeline.runner import Runner
from model.pipeline.safety import decide
from model.pipeline.spec import SAFETY_CHECKER
from model.pipeline.text_to_image import generate
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from model.store.precision import FP32
from tests.support import toy_safety_checker
from tests.support.images import largest_difference, pixels
from tests.support.in_process import serve_in_process
from tests.support.parity import load, params_of, publish, request_of
from tests.support.predictions import post, predict

IMAGES = 6
FIELDS: dict[str, Any] = {"num_inference_steps": 4, "num_images": IMAGES, "seed": 0, "output_format": "png"}


def generate_all(loaded: Loaded) -> list[Pixels]:
    return generate(loaded.model, [params_of(loaded, **FIELDS)])[0]


@pytest.fixture(scope="module")
def plain(toy_store: WritableStore) -> list[Pixels]:
    """The images of a request without a safety checker."""
    return generate_all(load(toy_store, "toy-sdxl/1"))


@pytest.fixture(scope="module")
def folder(plain: list[Pixels], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a checker that flags half of these images."""
    return toy_safety_checker.write(tmp_path_factory.mktemp("checker"), plain)


@pytest.fixture(scope="module")
def checker(folder: Path) -> StableDiffusionSafetyChecker:
    return toy_safety_checker.read(folder)


@pytest.fixture(scope="module")
def flagged(checker: StableDiffusionSafetyChecker, plain: list[Pixels]) -> list[bool]:
    """diffusers' decisions."""
    decisions = toy_safety_checker.flagged(checker, plain)
    assert sum(decisions) == IMAGES // 2
    return decisions


@pytest.fixture(scope="module")
def checked_store(
    toy_folder: Path, folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> WritableStore:
    """A store with the toy and its safety checker, published as checked/1."""
    base = Checkpoint(toy_folder, safety_checker=find_safety_checker(str(folder)))
    return publish("checked", base, target, tmp_path_factory.mktemp("checked-store"))


@pytest.fixture(scope="module")
def client(checked_store: WritableStore) -> Iterator[httpx.Client]:
    """A server that blanks flagged images."""
    with serve_in_process(load(checked_store, "checked/1", safety="blank")) as client:
        yield client


@pytest.fixture(scope="module")
def request_fields(checked_store: WritableStore) -> dict[str, Any]:
    return request_of(params_of(load(checked_store, "checked/1"), **FIELDS))


@pytest.mark.parametrize("seed", range(5))
def test_decides_like_diffusers(seed: int) -> None:
    """For scores near 0, of which some are raised by a special concept."""
    generator = torch.Generator().manual_seed(seed)
    embeds, concepts, special = (normalize(torch.randn(n, 8, generator=generator)) for n in (1000, 17, 3))
    thresholds = [torch.quantile(embeds @ rows.T, level, dim=0) for rows, level in ((concepts, 0.97), (special, 0.8))]
    network = SimpleNamespace(
        vision_model=lambda given: (None, given),
        visual_projection=lambda given: given,
        concept_embeds=concepts,
        special_care_embeds=special,
        concept_embeds_weights=thresholds[0],
        special_care_embeds_weights=thresholds[1],
    )
    expected = StableDiffusionSafetyChecker.forward(network, embeds, [np.zeros(1) for _ in embeds])[1]
    scores = embeds @ special.T - thresholds[1], embeds @ concepts.T - thresholds[0]
    assert decide(*scores).tolist() == expected
    # The adjustment matters in these cases.
    assert decide(torch.full_like(scores[0], -1), scores[1]).tolist() != expected


@pytest.mark.parametrize(("special", "concept", "expected"), [
    (-1.0, 0.0006, True), (-1.0, 0.0004, False), (0.0006, -0.0094, True), (0.0006, -0.0096, False),
    (0.0004, -0.0094, False), (1.0, -0.02, False),
])  # fmt: skip
def test_scores_are_rounded(special: float, concept: float, expected: bool) -> None:
    scores = torch.full((1, 3), -1.0), torch.full((1, 17), -1.0)
    scores[0][0, 0], scores[1][0, 4] = special, concept
    assert decide(*scores).tolist() == [expected]


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.mark.parametrize(
    ("height", "width"),
    [(64, 64), (128, 192), (512, 768), (200, 97), (224, 224), (640, 320), (960, 320), (301, 907), (3072, 1536)],
)
def test_prepares_images_like_clips_processor(height: int, width: int) -> None:
    """All levels are equal, also of noise, which the filter overshoots. Large images are prepared in parts."""
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    with LargestTensor() as largest:
        prepared = clip_input(torch.from_numpy(image)[None], side=224)
    assert 0 < largest.bytes <= 2**25  # the largest image alone has 108 MiB in float64
    difference = (prepared - toy_safety_checker.clip_pixels([image])).abs()
    # float32 rounding of the normalization
    assert (difference * 255 * torch.tensor(DEVIATION)[:, None, None]).max() < (0.001 if height < 2000 else 0.003)


def test_scores_are_those_of_diffusers(
    checked_store: WritableStore, checker: Any, plain: list[Pixels], flagged: list[bool]
) -> None:
    """For images that this project prepared."""
    loaded = load(checked_store, "checked/1", safety="flag")
    levels = torch.from_numpy(np.stack(plain))
    actual = loaded.model.engines[SAFETY_CHECKER].run({"pixel_values": clip_input(levels, side=224)})
    expected = toy_safety_checker.scores(checker, plain)
    for name, scores in zip(("special_scores", "concept_scores"), expected, strict=True):
        np.testing.assert_allclose(actual[name].numpy(), scores, atol=1e-3)
    assert decide(actual["special_scores"], actual["concept_scores"]).tolist() == flagged


def test_blanks_flagged_images_and_says_so(
    client: httpx.Client, request_fields: dict[str, Any], flagged: list[bool], plain: list[Pixels]
) -> None:
    before = flagged_images(client)
    body = predict(client, **request_fields)
    assert [image["flagged"] for image in body["images"]] == flagged
    for image, unchecked in zip(body["images"], plain, strict=True):
        wanted = np.zeros_like(unchecked) if image["flagged"] else unchecked
        # In a batch the others may be 1/255 apart.
        assert largest_difference(pixels(image["data"]), wanted) <= (0 if image["flagged"] else 1)
    assert body["warnings"] == [
        f"images.{index}: the safety checker flagged this image, and it was replaced by a black one."
        for index in range(IMAGES)
        if flagged[index]
    ]
    assert flagged_images(client) - before == IMAGES // 2
    enlarged = [pixels(image["data"]) for image in predict(client, **request_fields, upscale=2)["images"]]
    assert [(one.shape, one.any()) for one in enlarged] == [((128, 128, 3), not flag) for flag in flagged]


def flagged_images(client: httpx.Client) -> int:
    [line] = [line for line in client.get("/metrics/").text.splitlines() if line.startswith("preheat_flagged_images_t")]
    return int(float(line.split()[1]))


def test_streams_say_so(client: httpx.Client, request_fields: dict[str, Any], flagged: list[bool]) -> None:
    response = post(client, **request_fields, stream=True, preview_every=0)
    events = [json.loads(line) for line in response.text.splitlines()]
    images = {event["index"]: event for event in events if event["event"] == "image"}
    assert [images[index]["flagged"] for index in range(IMAGES)] == flagged
    assert [bool(pixels(images[index]["data"]).any()) for index in range(IMAGES)] == [not one for one in flagged]
    assert len(events[-1]["warnings"]) == IMAGES // 2


@pytest.mark.parametrize("fields", [{}, {"preview_every": 1}])
def test_refuses_previews_of_unchecked_images(
    fields: dict[str, int], client: httpx.Client, request_fields: dict[str, Any]
) -> None:
    response = post(client, **request_fields, stream=True, **fields)
    assert response.status_code == 400 and response.json()["field"] == "preview_every"
    assert "previews are not checked. Set 0." in response.json()["error"]


def test_flag_changes_no_image(checked_store: WritableStore, flagged: list[bool], plain: list[Pixels]) -> None:
    loaded = load(checked_store, "checked/1", safety="flag")
    scheduler = Scheduler([Runner(loaded.model)], Limits(), lambda: None)
    result = scheduler.submit(params_of(loaded, **FIELDS)).result.result()
    scheduler.close()
    assert result.flagged == flagged and not result.warnings
    np.testing.assert_array_equal([pixels(data) for data in result.images], plain)


def test_off_loads_no_checker(checked_store: WritableStore, plain: list[Pixels]) -> None:
    loaded = load(checked_store, "checked/1")
    assert SAFETY_CHECKER not in loaded.model.engines
    np.testing.assert_array_equal(generate_all(loaded), plain)


@pytest.mark.parametrize("safety", ["flag", "blank"])
def test_refuses_a_release_without_a_checker(safety: str, toy_store: WritableStore) -> None:
    with pytest.raises(MissingComponent, match="toy-sdxl/1 has no safety checker for .*--safety-checker PATH"):
        load(toy_store, "toy-sdxl/1", safety=safety)


def test_finds_the_checker_of_a_model_folder(folder: Path, tmp_path: Path) -> None:
    own = folder / "safety_checker"
    assert find_safety_checker(str(folder)) == find_safety_checker(str(own)) == own
    with pytest.raises(CheckpointError, match=r"has no config\.json and no safety_checker/config\.json"):
        find_safety_checker(str(tmp_path))


CHECKER, PROCESSOR = "safety_checker/config.json", "feature_extractor/preprocessor_config.json"


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        (CHECKER, {"architectures": ["CLIPModel"]}, "architectures is .'CLIPModel'., expected"),
        (CHECKER, {"vision_config": {"image_size": 0}}, "image_size of vision_config is 0"),
        (CHECKER, {"vision_config": 3}, "image_size of vision_config is None"),
        (PROCESSOR, {"size": {"shortest_edge": 336}}, "size is .* only CLIP's"),
        (PROCESSOR, {"image_mean": [0.5, 0.5, 0.5]}, "image_mean is .* only CLIP's"),
        (PROCESSOR, {"resample": 2}, "resample is 2, and only CLIP's"),
    ],
)
def test_refuses_another_checker(
    file: str, entries: dict[str, Any], message: str, folder: Path, toy_folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder, tmp_path / "checker")
    (copied / file).write_text(json.dumps(json.loads((copied / file).read_text()) | entries))
    with pytest.raises(CheckpointError, match=message):
        check_model(Checkpoint(toy_folder, safety_checker=copied / "safety_checker"), None)


def test_reads_the_older_names_of_weights(folder: Path, toy_folder: Path, tmp_path: Path, plain: list[Pixels]) -> None:
    """As in the folder of Stable Diffusion 1.5."""
    copied = shutil.copytree(folder, tmp_path / "checker")
    path = copied / "safety_checker" / "model.safetensors"
    older = {name.replace("vision_model.", "vision_model.vision_model."): one for name, one in load_file(path).items()}
    older["vision_model.vision_model.embeddings.position_ids"] = torch.arange(50)[None]
    save_file(older, path, {"format": "pt"})
    outputs = []
    for one in (folder, copied):
        network = load_network(Checkpoint(toy_folder, safety_checker=one / "safety_checker"), SAFETY_CHECKER, FP32)
        outputs.append(network.module(toy_safety_checker.clip_pixels(plain)))
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
