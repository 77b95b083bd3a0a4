"""Images of prompts with embeddings of textual inversion are those of diffusers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file
from typer.testing import CliRunner

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.embeddings.add import add_embeddings, parse_embedding
from engine_builder.embeddings.read import BadEmbedding, read_embedding
from engine_builder.releases.publish import publish
from engine_builder.releases.signing import public_key
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.loading.load import Loaded, load_release
from model.loading.target import Target, detect_targets
from model.pipeline.params import GenerationParams
from model.pipeline.text_to_image import generate
from model.store.precision import FP32
from tests.conftest import KEPT_TOYS, file_lock
from tests.support.adapters import copy_store
from tests.support.images import largest_difference
from tests.support.reference import Reference

TOLERANCE = 2  # of 255: float32 rounding, in another order
ROWS, WIDTH = 6, 16  # of the toy's text encoders
VECTORS = {"<cat>": 3, "<ink>": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An embedding of three vectors in kohya's keys, and one of a single vector in diffusers' older keys."""
    folder = tmp_path_factory.mktemp("embeddings")
    generator = torch.Generator().manual_seed(0)
    keys = {"<cat>": ("clip_l", "clip_g"), "<ink>": ("text_encoders_0", "text_encoders_1")}
    files = {}
    for token, names in keys.items():
        files[token] = folder / f"{token[1:-1]}.safetensors"
        shape = (VECTORS[token], WIDTH)
        save_file({name: torch.randn(shape, generator=generator) for name in names}, files[token])
    return files


@pytest.fixture(scope="module")
def store(
    toy_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory, show_progress: Callable[[str], None]
) -> WritableStore:
    """A store with the toy and free rows, published as worded/1. Its engines are kept between runs."""
    plan = BuildPlan("worded", Checkpoint(toy_folder, embedding_rows=ROWS), None, target, FP32)
    folder = tmp_path_factory.mktemp("embedding-store") / "store"
    with file_lock(KEPT_TOYS.with_suffix(".lock")):
        report = lambda component, activity, *_: show_progress(f"toy with rows: {component}: {activity}")  # noqa: E731
        build(plan, open_writable_store(KEPT_TOYS), report, processes=2)
        shutil.copytree(KEPT_TOYS, folder)
    store = open_writable_store(folder)
    publish(store, "worded")
    return store


@pytest.fixture(scope="module")
def worded(store: WritableStore, files: dict[str, Path]) -> Loaded:
    """The release with both embeddings, worded/2."""
    assert add_embeddings(store, "worded/1", files).name == "worded/2"
    return load_release(store, "worded/2", detect_targets(), [], ColdStart())


@pytest.fixture(scope="module")
def reference(toy_folder: Path, files: dict[str, Path]) -> Reference:
    reference = Reference(toy_folder)
    pipeline = reference._base["text to image"]
    for token, path in files.items():
        first, second = read_embedding(path, 2)
        pipeline.load_textual_inversion(
            first, token=token, text_encoder=pipeline.text_encoder, tokenizer=pipeline.tokenizer
        )
        pipeline.load_textual_inversion(
            second, token=token, text_encoder=pipeline.text_encoder_2, tokenizer=pipeline.tokenizer_2
        )
    return reference


def params_of(loaded: Loaded, prompt: str, **fields: object) -> GenerationParams:
    request = {"prompt": prompt, "seed": 7, "width": 64, "height": 64, "num_inference_steps": 4} | fields
    return resolve(GenerationRequest.model_validate(request), loaded.served)


PROMPTS = {
    "one vector": ("a photo of <ink> at dusk", {}),
    "three vectors": ("<cat>", {}),
    "both": ("a red <cat> on <ink>, <cat>", {}),
    "without spaces": ("a<cat>b<ink>", {}),
    "negative prompt": ("a circle", {"negative_prompt": "a <cat>"}),
    "capitals": ("A Photo of <CAT> and <Ink>", {}),
    "longer than 77 tokens": ("a large red circle on a blue background " * 9 + "<cat>", {}),
    "at the end of 77 tokens": ("circle " * 74 + "<cat>", {}),
    "no embedding": ("a large red circle", {}),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_images_are_those_of_diffusers(case: str, worded: Loaded, reference: Reference) -> None:
    prompt, fields = PROMPTS[case]
    params = params_of(worded, prompt, **fields)
    assert largest_difference(generate(worded.model, [params])[0][0], reference.generate(params)) <= TOLERANCE


def test_each_embedding_changes_the_image(worded: Loaded) -> None:
    """So the comparisons above can fail."""
    prompts = ("a photo of", "a photo of <cat>", "a photo of <ink>", "a photo of cat")
    images = [generate(worded.model, [params_of(worded, prompt)])[0][0] for prompt in prompts]
    differences = [largest_difference(images[i], images[j]) for i in range(4) for j in range(i)]
    assert min(differences) > TOLERANCE, differences


def test_a_new_version_shares_all_but_texts(store: WritableStore, worded: Loaded) -> None:
    old, new = (store.read_release(f"worded/{version}") for version in (1, 2))
    assert new.engines == old.engines
    weights = [{w.component: w.identity for w in manifest.weights} for manifest in (old, new)]
    assert {name for name in weights[0] if weights[0][name] != weights[1][name]} == {"text_encoder", "text_encoder_2"}
    assert json.loads(new.builder["embeddings"]).keys() == VECTORS.keys()


def test_adds_more_to_a_version_and_signs_it(
    store: WritableStore, worded: Loaded, files: dict[str, Path], tmp_path: Path
) -> None:
    """Rows are left for two more vectors, and not for a third."""
    key = Ed25519PrivateKey.generate()
    opened = open_writable_store(copy_store(store, tmp_path / "store"))
    one = tmp_path / "one.safetensors"
    save_file({"clip_l": torch.ones(2, WIDTH), "clip_g": torch.ones(2, WIDTH)}, one)
    with pytest.raises(BadEmbedding, match="worded/2 has no free row for 3 vectors: text_encoder has rows for 2 more"):
        add_embeddings(opened, "worded/2", {"<dog>": files["<cat>"]})
    manifest = add_embeddings(opened, "worded/2", {"<dog>": one}, key)
    assert manifest.name == "worded/3"
    assert json.loads(manifest.builder["embeddings"]).keys() == {*VECTORS, "<dog>"}
    again = load_release(opened, "worded/3", detect_targets(), [], ColdStart(), public_keys=[public_key(key)])
    [with_cat], [as_before] = (generate(loaded.model, [params_of(loaded, "a <cat>")])[0] for loaded in (again, worded))
    assert largest_difference(with_cat, as_before) == 0


def test_refuses_a_release_without_rows(toy_store: WritableStore, files: dict[str, Path], tmp_path: Path) -> None:
    opened = open_writable_store(copy_store(toy_store, tmp_path / "store"))
    with pytest.raises(BadEmbedding, match="has no free row for 1 vectors: text_encoder has rows for 0 more") as error:
        add_embeddings(opened, "toy-sdxl/1", {"<ink>": files["<ink>"]})
    assert "preheat build --embedding-rows" in str(error.value)
    assert opened.releases() == ["toy-sdxl/1"]


def test_refuses_tokens_of_the_vocabulary(store: WritableStore, worded: Loaded, files: dict[str, Path]) -> None:
    for token in ("a</w>", "<|endoftext|>"):
        with pytest.raises(BadEmbedding, match="is in the release's tokenizer already"):
            add_embeddings(store, "worded/1", {token: files["<ink>"]})
    with pytest.raises(BadEmbedding, match="'<cat>' is in the release's tokenizer already"):
        add_embeddings(store, "worded/2", {"<cat>": files["<ink>"]})
    assert store.releases() == ["worded/1", "worded/2"]


TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "one encoder": ({"clip_l": torch.ones(1, WIDTH)}, "has clip_l, expected clip_l and clip_g"),
    "other keys": ({"a": torch.ones(1, WIDTH), "b": torch.ones(1, WIDTH)}, "has a, b, expected clip_l and clip_g"),
    "nothing": ({}, "has nothing, expected"),
    "integers": (dict.fromkeys(("clip_l", "clip_g"), torch.ones(1, WIDTH, dtype=torch.int64)), "clip_l is torch.int64"),
    "dimensions": (dict.fromkeys(("clip_l", "clip_g"), torch.ones(1, 1, WIDTH)), r"expected \[vectors, width\]"),
    "no vector": (dict.fromkeys(("clip_l", "clip_g"), torch.ones(0, WIDTH)), r"expected \[vectors, width\]"),
    "NaN": (dict.fromkeys(("clip_l", "clip_g"), torch.full((1, WIDTH), torch.nan)), "holds NaN or infinity"),
    "numbers of vectors": ({"clip_l": torch.ones(1, WIDTH), "clip_g": torch.ones(2, WIDTH)}, "has 1 and 2 vectors"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_refuses_files_that_are_not_embeddings(case: str, tmp_path: Path) -> None:
    tensors, message = TENSORS[case]
    path = tmp_path / "x.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    with pytest.raises(BadEmbedding, match=message):
        read_embedding(path, 2)


def test_refuses_other_files(store: WritableStore, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x02")
    (tmp_path / "x.safetensors").write_bytes(b"\0" * 20)
    wide = tmp_path / "wide.safetensors"
    save_file({"clip_l": torch.ones(1, 768), "clip_g": torch.ones(1, 1280)}, wide)
    with pytest.raises(BadEmbedding, match="may hold a pickle, which can run code. It was not opened"):
        read_embedding(tmp_path / "x.pt", 2)
    for name in ("x.safetensors", "missing.safetensors"):
        with pytest.raises(BadEmbedding, match="is not a complete safetensors file"):
            read_embedding(tmp_path / name, 2)
    with pytest.raises(BadEmbedding, match="vectors of width 768, and text_encoder of release worded/1 has tokens of"):
        add_embeddings(store, "worded/1", {"<x>": wide})


def test_reads_one_tensor_for_models_of_one_encoder(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"<cat-toy>": torch.ones(WIDTH).half()}, path)
    [vectors] = read_embedding(path, 1)
    assert vectors.shape == (1, WIDTH) and vectors.dtype == torch.float32


@pytest.mark.parametrize("text", ["", "<x>", "<x>=", "=file", "two words=file", f"{'a' * 65}=file", "a\x00=file"])
def test_refuses_options_that_are_not_token_and_file(text: str) -> None:
    with pytest.raises(BadEmbedding, match="is not TOKEN=FILE"):
        parse_embedding(text)


def test_the_command_publishes_the_next_version(store: WritableStore, files: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_store(store, tmp_path / "store")
    options = [f"{token}={path}" for token, path in files.items()]
    result = CliRunner().invoke(app, ["add-embedding", "worded/1", *options, "--store", str(folder)])
    assert result.exit_code == 0, result.output
    newest = open_writable_store(folder).releases()[-1]
    assert f"Published {newest} with <cat>, <ink>." in " ".join(result.output.split())


def test_a_plan_with_rows_has_other_text_encoders_only(toy_plan: BuildPlan) -> None:
    from engine_builder.networks.network import ModuleReader

    with_rows = replace(toy_plan, base=replace(toy_plan.base, embedding_rows=ROWS))
    for name in ("text_encoder", "text_encoder_2", "unet_text", "unet"):
        networks = [plan.load(name, ModuleReader()) for plan in (toy_plan, with_rows)]
        is_same = networks[0].architecture == networks[1].architecture
        assert is_same == name.startswith("unet")
