"""A server takes over embeddings that `preheat add-embedding` adds to later versions of its releases."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.embeddings.add import add_embeddings
from engine_builder.embeddings.read import open_embedding
from engine_builder.releases import publish as publishing
from engine_builder.releases.signing import public_key
from engine_builder.stores.store import WritableStore, open_writable_store
from model import serving
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.images.pixels import Pixels
from model.loading.embeddings import may_differ_in_embeddings_only
from model.loading.target import Target
from model.request_fields import GenerationRequest
from model.serving import start_server
from model.settings import Settings
from model.store.keys import release_key
from model.store.manifest import Blob
from model.store.precision import FP32
from tests.engine_builder.helpers import edit_weights, folder_of, perturb
from tests.support.images import pixels
from tests.support.parity import image_of, load, params_of, publish
from tests.support.scheduling import results
from tests.support.uncompiled import builds_without_compiling
from tests.support.waiting import eventually

ROWS, WIDTH = 6, 16  # of the toy's text encoders
PROMPT = "a red <cat> on <ink>"


@pytest.fixture(scope="module")
def first_store(toy_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the toy and free rows, published as worded/1."""
    return publish("worded", Checkpoint(toy_folder, embedding_rows=ROWS), target, tmp_path_factory.mktemp("first"))


@pytest.fixture
def store(first_store: WritableStore, tmp_path: Path) -> WritableStore:
    return open_writable_store(shutil.copytree(folder_of(first_store), tmp_path / "store"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "EMBEDDING_SECONDS", 0.05)


def add(
    store: WritableStore,
    release: str,
    token: str,
    seed: int,
    key: Ed25519PrivateKey | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> str:
    """Publish the next version of a release with an embedding of two vectors. Returns its name."""
    generator = torch.Generator().manual_seed(seed)
    path = folder_of(store) / f"{seed}.safetensors"
    save_file({name: torch.randn(2, WIDTH, generator=generator) for name in ("clip_l", "clip_g")}, path)
    return add_embeddings(store, release, {token: open_embedding([path])}, key, warn)[0].name


@contextmanager
def served(store: WritableStore, *releases: str, **settings: Any) -> Iterator[Callable[..., Pixels]]:
    """Serve releases in this process. Returns a function that generates the image of a prompt."""
    own = Settings(store=store.url, releases=list(releases), follow_embeddings=True, **settings)
    loaded, scheduler = start_server(own, {}, lambda: store, ColdStart(), lambda: None)

    def image(prompt: str = PROMPT, model: int = 0) -> Pixels:
        request = {"prompt": prompt, "seed": 7, "num_inference_steps": 2, "width": 64, "height": 64}
        request |= {"output_format": "png"}
        params = resolve(GenerationRequest.model_validate(request), loaded[model].served)
        [result] = results(scheduler.submit(params, model=model))
        return pixels(result.images[0])

    try:
        yield image
    finally:
        scheduler.close()


def alone(store: WritableStore, release: str, prompt: str = PROMPT) -> Pixels:
    """Return the image of a server of the release alone."""
    loaded = load(store, release)
    return image_of(loaded.model, params_of(loaded, prompt=prompt, num_inference_steps=2, width=64, height=64))


def becomes(image: Callable[..., Pixels], expected: Pixels, **options: Any) -> None:
    """Wait until the server gives an image. Each request lets it look for later versions."""
    eventually(lambda: np.array_equal(image(**options), expected), "the image of the later version")


def test_takes_over_embeddings_of_later_versions(store: WritableStore) -> None:
    with served(store, "worded/1") as image:
        before = image()
        plain = image("a red circle")
        assert np.array_equal(before, alone(store, "worded/1"))
        second = add(store, "worded/1", "<cat>", 1)
        becomes(image, alone(store, second))
        third = add(store, second, "<ink>", 2)
        becomes(image, alone(store, third))
        assert np.array_equal(image("a red circle"), plain)
        assert not np.array_equal(image(), before)


def test_a_restart_takes_over_the_same_versions(store: WritableStore, caplog: pytest.LogCaptureFixture) -> None:
    """Also if a version was made of the first one again, without the embedding of the version before it."""
    second = add(store, "worded/1", "<cat>", 1)
    with served(store, "worded/1") as image:
        becomes(image, alone(store, second))
        assert add(store, "worded/1", "<ink>", 2) == "worded/3"
        eventually(lambda: f"worded/3 is not taken over: it differs from {second}" in caplog.text, "the warning")
    caplog.clear()
    with served(store, "worded/1") as restarted:
        eventually(lambda: f"worded/3 is not taken over: it differs from {second}" in caplog.text, "the same choice")
        assert np.array_equal(restarted(), alone(store, second))
        fourth = add(store, second, "<ink>", 3)
        becomes(restarted, alone(store, fourth))


def test_warns_of_a_version_that_is_not_taken_over(store: WritableStore) -> None:
    """Servers use worded/2 and then worded/4, although worded/3 is newer than worded/2."""
    warnings: list[str] = []
    second = add(store, "worded/1", "<cat>", 1, warn=warnings.append)
    assert warnings == []
    third = add(store, "worded/1", "<ink>", 2, warn=warnings.append)
    assert [text.partition(", so")[0] for text in warnings] == [f"{third} lacks <cat> of {second}"]
    fourth = add(store, second, "<dog>", 3, warn=warnings.append)
    assert len(warnings) == 1
    add(store, third, "<dog>", 3, warn=warnings.append)
    assert f"lacks <cat> of {fourth}," in warnings[1] and f"add to {fourth} instead" in warnings[1]


def test_leaves_other_versions_and_unsigned_ones(
    store: WritableStore, toy_folder: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that was trained again, and embeddings that nobody has signed."""
    key = Ed25519PrivateKey.generate()
    second = add(store, "worded/1", "<cat>", 1, key)
    checkpoint = Path(shutil.copytree(toy_folder, tmp_path / "trained"))
    edit_weights(checkpoint / "text_encoder", perturb)
    with builds_without_compiling():
        build(BuildPlan("worded", Checkpoint(checkpoint, embedding_rows=ROWS), None, target, FP32), store)
    with served(store, second, public_key=str(public_key(key))) as image:
        before = image()
        assert publishing.publish(store, "worded")[0].name == "worded/3"
        assert add(store, second, "<ink>", 2) == "worded/4"
        eventually(lambda: image() is not None and "worded/4 is not signed" in caplog.text, "the refusal")
        assert np.array_equal(image(), before)
        fifth = add(store, second, "<ink>", 2, key)
        becomes(image, alone(store, fifth))


def test_releases_that_take_turns_get_embeddings(
    store: WritableStore, toy_folder: Path, target: Target, tmp_path: Path
) -> None:
    """Also one that is not on the device when its embedding is added."""
    checkpoint = Path(shutil.copytree(toy_folder, tmp_path / "style"))
    for part in ("unet", "text_encoder", "text_encoder_2"):
        edit_weights(checkpoint / part, perturb)
    with builds_without_compiling():
        build(BuildPlan("style", Checkpoint(checkpoint, embedding_rows=ROWS), None, target, FP32), store)
    publishing.publish(store, "style")
    with served(store, "worded/1", "style/1", weight_slots=1) as image:
        first = image(model=1)
        second = add(store, "worded/1", "<cat>", 1)
        becomes(image, alone(store, second))
        assert np.array_equal(image(model=1), first)
        of_style = add(store, "style/1", "<ink>", 2)
        becomes(image, alone(store, of_style), model=1)
        assert np.array_equal(image(), alone(store, second))


def test_refuses_rows_that_a_table_does_not_have(store: WritableStore, caplog: pytest.LogCaptureFixture) -> None:
    second = add(store, "worded/1", "<cat>", 1)
    path = folder_of(store) / release_key(second)
    manifest = json.loads(path.read_text())
    for record in manifest["tokenizers"].values():
        record["embeddings"]["<cat>"] = [60_000, 60_001]
    path.write_text(json.dumps(manifest))
    with served(store, "worded/1") as image:
        eventually(lambda: "cannot be taken over" in caplog.text and "60001" in caplog.text, "the refusal")
        assert np.array_equal(image(), alone(store, "worded/1"))


@pytest.mark.parametrize(("component", "may"), [("text_encoder", True), ("text_encoder_2", True), ("unet", False)])
def test_a_refiner_may_share_a_text_encoder(component: str, may: bool, published: tuple[WritableStore, str]) -> None:
    """`preheat add-embedding` changes the weights of the base and of the refiner that read the same ids."""
    manifest = published[0].read_release(published[1])
    other = Blob(sha256="a" * 64, bytes=8)
    weights = tuple(
        one.model_copy(update={"blobs": (other,)}) if one.component.removeprefix("refiner_") == component else one
        for one in manifest.weights
    )
    changed = sum(one.blobs == (other,) for one in weights)
    assert changed == (2 if component != "text_encoder" else 1)
    later = manifest.model_copy(update={"version": "99", "created": "later", "weights": weights})
    assert may_differ_in_embeddings_only(manifest, later) == may
