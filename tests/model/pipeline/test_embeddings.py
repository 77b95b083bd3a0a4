"""Images of prompts with embeddings of textual inversion are those of diffusers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from typer.testing import CliRunner, Result

from engine_builder.backends.built import put_blob
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.embeddings.add import add_embeddings, open_embeddings
from engine_builder.embeddings.read import BadEmbedding, open_embedding, read_vectors
from engine_builder.releases.signing import public_key
from engine_builder.stores.store import WritableStore, open_writable_store
from model.loading.load import Loaded
from model.loading.target import Target
from model.pipeline.text_to_image import generate
from preheat.main import app
from tests.support.adapters import PACKABLE, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.parity import check_all_differ, check_images, image_of, load, params_of, publish
from tests.support.reference import Reference

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
def store(toy_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the toy and free rows, published as worded/1."""
    return publish("worded", Checkpoint(toy_folder, embedding_rows=ROWS), target, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def worded(store: WritableStore, files: dict[str, Path]) -> Loaded:
    """The release with both embeddings, worded/2."""
    opened = {token: open_embedding([path]) for token, path in files.items()}
    assert add_embeddings(store, "worded/1", opened)[0].name == "worded/2"
    return load(store, "worded/2")


@pytest.fixture(scope="module")
def reference(toy_folder: Path, files: dict[str, Path]) -> Reference:
    reference = Reference(toy_folder)
    pipeline = reference._base["text to image"]
    for token, path in files.items():
        first, second = read_vectors(open_embedding([path]), 2)
        parts = {first: ("text_encoder", "tokenizer"), second: ("text_encoder_2", "tokenizer_2")}
        for vectors, names in parts.items():
            encoder, tokenizer = (getattr(pipeline, name) for name in names)
            pipeline.load_textual_inversion(vectors, token=token, text_encoder=encoder, tokenizer=tokenizer)
    return reference


PROMPTS = [
    "a photo of <ink> at dusk",
    "<cat>",
    "a red <cat> on <ink>, <cat>",
    "a<cat>b<ink>",
    "a large red circle on a blue background " * 9 + "<cat>",
    "a large red circle",
]


def test_images_are_those_of_diffusers(worded: Loaded, reference: Reference) -> None:
    """Also without an embedding, and with one after the 77 tokens that are read."""
    params = params_of(worded, num_inference_steps=4)
    negative = replace(params, negative_prompt="a <cat>")
    check_images(worded.model, reference, *(replace(params, prompt=prompt) for prompt in PROMPTS), negative)
    changed = (replace(params, prompt=f"a photo of {word}") for word in ("", "<cat>", "<ink>", "cat"))
    check_all_differ(worded.model, *changed)


@pytest.mark.parametrize("syntax", ["plain", "weighted"])
def test_capitals_mean_the_same_token(syntax: str, worded: Loaded) -> None:
    """Unlike in diffusers, which uses the first vector alone."""
    lower = params_of(worded, prompt="a photo of <cat> and <ink>", prompt_syntax=syntax)
    upper = replace(lower, prompt="A Photo of <CAT> and <Ink>")
    assert np.array_equal(image_of(worded.model, lower), image_of(worded.model, upper))


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_warns_of_an_embedding_that_is_left_out(field: str, worded: Loaded) -> None:
    params = params_of(worded, prompt="a circle", negative_prompt="a square")
    cut, without = (replace(params, **{field: "circle " * 74 + last}) for last in ("<cat>", ""))
    [image], _, warnings = generate(worded.model, [cut])
    assert [warning.partition(";")[0] for warning in warnings] == [
        f"{field}: the text encoders read 77 tokens",
        f'{field}: the embedding "<cat>" was left out as a whole, because not all of its vectors fit. Write it '
        "earlier.",
    ]
    [expected], _, none = generate(worded.model, [without])
    assert not none and np.array_equal(image, expected)


def check_equal_images(one: Loaded, other: Loaded, *prompts: str, replaced: str = "") -> None:
    """Both give the same image of each prompt. `replaced`: the name of <cat> in the first."""
    for prompt in prompts:
        first = image_of(one.model, params_of(one, prompt=prompt.replace("<cat>", replaced or "<cat>")))
        assert np.array_equal(first, image_of(other.model, params_of(other, prompt=prompt)))


def write(path: Path, *vectors: int, width: int = WIDTH) -> Path:
    """Write an embedding of so many vectors for each of SDXL's text encoders. Returns `path`."""
    save_file({key: torch.ones(count, width) for key, count in zip(("clip_l", "clip_g"), vectors, strict=True)}, path)
    return path


def test_a_new_version_shares_all_but_texts(store: WritableStore, worded: Loaded) -> None:
    old, new = (store.read_release(f"worded/{version}") for version in (1, 2))
    assert new.engines == old.engines
    weights = [{w.component: w.identity for w in manifest.weights} for manifest in (old, new)]
    assert {name for name in weights[0] if weights[0][name] != weights[1][name]} == {"text_encoder", "text_encoder_2"}
    assert json.loads(new.builder["embeddings"]).keys() == VECTORS.keys()
    assert new.schema_version == 5
    blobs = [{name: record.blob for name, record in manifest.tokenizers.items()} for manifest in (old, new)]
    assert blobs[0] == blobs[1]
    for record in new.tokenizers.values():
        assert {token: len(rows) for token, rows in (record.embeddings or {}).items()} == VECTORS


def test_adds_more_to_a_version_and_signs_it(
    store: WritableStore, worded: Loaded, files: dict[str, Path], tmp_path: Path
) -> None:
    """Rows are left for two more vectors, and not for a third."""
    key = Ed25519PrivateKey.generate()
    opened = open_writable_store(copy_store(store, tmp_path / "store"))
    one = write(tmp_path / "one.safetensors", 2, 2)
    message = "worded/2 has no free row for 3 vectors: text_encoder has rows for 2 more.*preheat build --embedding-rows"
    with pytest.raises(BadEmbedding, match=message):
        add_embeddings(opened, "worded/2", {"<dog>": open_embedding([files["<cat>"]])})
    manifest, is_new = add_embeddings(opened, "worded/2", {"<dog>": open_embedding([one])}, key)
    assert is_new and add_embeddings(opened, "worded/2", {"<dog>": open_embedding([one])}, key) == (manifest, False)
    assert manifest.name == "worded/3"
    assert json.loads(manifest.builder["embeddings"]).keys() == {*VECTORS, "<dog>"}
    again = load(opened, "worded/3", public_keys=[public_key(key)])
    check_equal_images(again, worded, "a <cat>")


def test_reads_releases_whose_tokenizers_have_the_tokens(store: WritableStore, worded: Loaded, tmp_path: Path) -> None:
    """As versions before schema 5 wrote them: <cat>, <cat>_1, <cat>_2 and <ink> are tokens of tokenizer.json."""
    opened = open_writable_store(copy_store(store, tmp_path / "store"))
    manifest = opened.read_release("worded/2")
    tokenizers = {}
    for name, record in manifest.tokenizers.items():
        tokenizer = Tokenizer.from_buffer(opened.get(record.blob.sha256, record.blob.bytes).read_bytes())
        tokens = ["<cat>", "<cat>_1", "<cat>_2", "<ink>"]
        tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in tokens])
        blob = put_blob(opened, tokenizer.to_str().encode())
        tokenizers[name] = record.model_copy(update={"blob": blob, "embeddings": None})
    settings = manifest.settings.model_copy(update={"preview": None})
    changes = {"version": "9", "tokenizers": tokenizers, "settings": settings, "schema_version": 4}
    old = manifest.model_copy(update=changes)
    opened.write_release(old)
    assert b'"embeddings": {' not in old.to_json() and opened.read_release("worded/9").required_schema < 5
    loaded = load(opened, "worded/9")
    check_equal_images(loaded, worded, "a <CAT> on <ink>", "<cat>")
    one = write(tmp_path / "one.safetensors", 2, 2)
    with pytest.raises(BadEmbedding, match="'<Cat>_1' is in the release's tokenizer already, as '<cat>_1'"):
        add_embeddings(opened, "worded/9", {"<Cat>_1": open_embedding([one])})
    added, _ = add_embeddings(opened, "worded/9", {"<cat>_3": open_embedding([one])})
    assert added.schema_version == 5
    assert {*(rows for record in added.tokenizers.values() for rows in (record.embeddings or {}).values())} == {
        tuple(range(first + 4, first + 6)) for first in {len(tokenizer.get_vocab()) - 4}
    }


def add(folder: Path, release: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["add-embedding", release, *options, "--store", str(folder)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["EasyNegative=one", "easynegative=one"], "'EasyNegative' and 'easynegative' are one for"),
        (["caf\u00e9=one", "cafe\u0301=one"], "'caf\u00e9' and 'cafe\u0301' are one for"),
        (["<x>=one", "<x>=one"], "The token '<x>' is given twice. Choose another token. Give a file for each"),
        (["<CAT>=one"], "The token '<CAT>' is in the release's tokenizer already, as '<cat>'."),
        (["<|EndOfText|>=one"], "is in the release's tokenizer already, as '<|endoftext|>'."),
        (["a</w>=one"], "is in the release's tokenizer already"),
        (["a<|endoftext|>=one"], "divides the token 'a<|endoftext|>' into 'a', '<|endoftext|>'. Choose"),
        (["<x>=many"], "The embedding of '<x>' has 76 vectors. A prompt is read in chunks of 75"),
    ],
)
def test_refuses_tokens_that_prompts_cannot_use(
    options: list[str], message: str, store: WritableStore, worded: Loaded, tmp_path: Path
) -> None:
    for name, count in (("one", 1), ("many", 76)):
        write(tmp_path / name, count, count)
    folder = copy_store(store, tmp_path / "store")
    result = add(folder, "worded/2", *(option.replace("=", f"={tmp_path}/") for option in options))
    assert isinstance(result.exception, BadEmbedding) and message in str(result.exception)
    assert open_writable_store(folder).releases() == ["worded/1", "worded/2"]


def test_the_command_publishes_the_next_version(
    store: WritableStore, worded: Loaded, files: dict[str, Path], tmp_path: Path
) -> None:
    """A file for each text encoder is as `textual_inversion_sdxl.py` of diffusers writes them."""
    names = ("learned_embeds.safetensors", "learned_embeds_2.safetensors")
    for name, vectors in zip(names, read_vectors(open_embedding([files["<cat>"]]), 2), strict=True):
        save_file({"<cat-toy>": vectors}, tmp_path / name)
    folder = copy_store(store, tmp_path / "store")
    for published in ("Published", "Unchanged since"):
        result = add(folder, "worded/1", f"<cat-toy>={tmp_path / names[0]},{tmp_path / names[1]}")
        assert result.exit_code == 0, result.output
        newest = open_writable_store(folder).releases()[-1]
        assert f"{published} {newest} with <cat-toy>." in " ".join(result.output.split())
    check_equal_images(load(open_writable_store(folder), newest), worded, "a red <cat>", replaced="<cat-toy>")


def test_embeddings_of_an_adapter_are_added_with_it(
    store: WritableStore, worded: Loaded, files: dict[str, Path], toy_folder: Path, tmp_path: Path
) -> None:
    """A file as OneTrainer writes it: an adapter with the embedding that it was trained with."""
    deltas = random_deltas(module_shapes(toy_folder), PACKABLE, 2, seed=1)
    bundle = load_file(write_adapter(tmp_path / "style.safetensors", deltas, "kohya"))
    bundle |= {f"bundle_emb.<cat-toy>.{key}": tensor for key, tensor in load_file(files["<cat>"]).items()}
    save_file(bundle, tmp_path / "style.safetensors")
    folder = copy_store(store, tmp_path / "store")

    def run(*options: str) -> Result:
        arguments = ["add-lora", "style", str(tmp_path / "style.safetensors"), "--store", f"file://{folder}", *options]
        return CliRunner().invoke(app, arguments)

    assert "which were left out: <cat-toy>" in " ".join(run().output.split())
    result = run("--embeddings", "worded/1")
    newest = open_writable_store(folder).releases()[-1]
    output = " ".join(result.output.split())
    assert result.exit_code == 0 and "left out" not in output, output
    assert "Unchanged: style, " in output and f"Published {newest} with <cat-toy>." in output
    check_equal_images(load(open_writable_store(folder), newest), worded, "a red <cat>", replaced="<cat-toy>")
    save_file({key: tensor for key, tensor in bundle.items() if "bundle" not in key}, tmp_path / "style.safetensors")
    assert run("--embeddings", "worded/1").exit_code == 2
    # Embeddings are checked before the adapter is written.
    save_file(bundle | {"bundle_emb.two words.clip_l": torch.zeros(1, 4)}, tmp_path / "style.safetensors")
    (folder / "adapters" / "style.json").unlink()
    assert "'two words' is not a token" in str(run("--embeddings", "worded/1").exception)
    assert open_writable_store(folder).adapters() == {}


def test_a_comma_may_be_in_the_name_of_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("a,b", "a", "b")]
    for path in paths:
        save_file({"x": torch.ones(1, 4)}, path)
    opened = open_embeddings([f"<x>={paths[0]}", f"<y>={paths[1]},{paths[2]}"])
    found = {token: [path for path, _ in embedding.files] for token, embedding in opened.items()}
    assert found == {"<x>": paths[:1], "<y>": paths[1:]}


ONE, SDXL = torch.ones(1, 768), {"clip_l": torch.ones(1, 768), "clip_g": torch.ones(1, 1280)}
FILES: list[tuple[list[dict[str, torch.Tensor]], int, str]] = [  # files, text encoders of the model, message
    ([{"clip_g": ONE}], 2, "has clip_g and lacks clip_l, the vectors of"),
    ([{"clip_l": ONE}], 2, "has clip_l and lacks clip_g, the vectors of SDXL's second"),
    ([{"text_encoders_0": ONE}], 2, "lacks text_encoders_1, the vectors of SDXL's second"),
    ([{"emb_params": ONE}], 2, "has the vectors of one text encoder only: emb_params, width 768 (SDXL's first text "
     "encoder or Stable Diffusion 1). SDXL has two. Give a file for each text encoder, in their order: "
     "TOKEN=FIRST.safetensors,"),
    ([{"emb_params": torch.ones(1024)}], 2, "emb_params, width 1024 (Stable Diffusion 2)"),
    ([SDXL], 1, "has clip_g, clip_l: an embedding for the two text encoders of SDXL. Expected one tensor"),
    ([{"<x>": ONE}] * 2, 1, "2 files were given for one token. The model"),
    ([{"<x>": ONE}] * 3, 2, "3 files were given for one token. The model has 2"),
    ([SDXL] * 2, 2, "Give that file alone"),
    ([{"<x>": ONE}, {"<x>": torch.ones(2, 1280)}], 2, "has 1 and 2 vectors"),
    ([{"a": ONE, "b": ONE}], 2, "has a, b, expected clip_l and clip_g"),
    ([{}], 2, "has nothing, expected"),
    ([SDXL | {"clip_l": ONE.long()}], 2, "clip_l is torch.int64"),
    ([SDXL | {"clip_l": ONE[None]}], 2, "expected [vectors, width]"),
    ([SDXL | {"clip_l": ONE[:0]}], 2, "expected [vectors, width]"),
    ([SDXL | {"clip_l": ONE * torch.nan}], 2, "holds NaN or infinity"),
    ([SDXL | {"clip_g": torch.ones(2, 1280)}], 2, "has 1 and 2 vectors"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "encoders", "message"), FILES)
def test_refuses_files_that_are_not_embeddings(
    files: list[dict[str, torch.Tensor]], encoders: int, message: str, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    with pytest.raises(BadEmbedding, match=re.escape(message)):
        read_vectors(open_embedding(paths), encoders)


def test_refuses_other_files(store: WritableStore, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x02")
    (tmp_path / "x.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BadEmbedding, match="may hold a pickle, which can run code. It was not opened"):
        read_vectors(open_embedding([tmp_path / "x.pt"]), 2)
    for name, problem in (
        ("x.safetensors", "is not a complete safetensors file"),
        ("y.safetensors", "cannot be read: No"),
    ):
        with pytest.raises(BadEmbedding, match=problem):
            read_vectors(open_embedding([tmp_path / name]), 2)
    wide = write(tmp_path / "wide.safetensors", 1, 1, width=768)
    message = r"vectors of width 768 .*, and text_encoder of release worded/1 has tokens of"
    with pytest.raises(BadEmbedding, match=message):
        add_embeddings(store, "worded/1", {"<x>": open_embedding([wide])})


def test_reads_one_tensor_for_models_of_one_encoder(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"<cat-toy>": torch.ones(WIDTH).half()}, path)
    [vectors] = read_vectors(open_embedding([path]), 1)
    assert vectors.shape == (1, WIDTH) and vectors.dtype == torch.float32


def test_refuses_options_that_are_not_token_and_file() -> None:
    for text in ("", "<x>", "<x>=", "<x>=a,", "<x>=,a", "=file", "two words=file", f"{'a' * 65}=file", "a\x00=file"):
        with pytest.raises(BadEmbedding, match="is not TOKEN=FILE"):
            open_embeddings([text])
