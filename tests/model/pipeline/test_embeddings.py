"""Images of prompts with embeddings of textual inversion are those of diffusers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from typer.testing import CliRunner

from engine_builder.backends.built import put_blob
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.embeddings.add import add_embeddings, parse_embeddings
from engine_builder.embeddings.read import BadEmbedding, read_embedding
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
from tests.support.adapters import copy_store
from tests.support.images import largest_difference
from tests.support.reference import Reference
from tests.support.uncompiled import publish_uncompiled

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
def store(toy_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the toy and free rows, published as worded/1."""
    plan = BuildPlan("worded", Checkpoint(toy_folder, embedding_rows=ROWS), None, target, FP32)
    return publish_uncompiled(plan, tmp_path_factory.mktemp("embedding-store") / "store")


@pytest.fixture(scope="module")
def worded(store: WritableStore, files: dict[str, Path]) -> Loaded:
    """The release with both embeddings, worded/2."""
    assert add_embeddings(store, "worded/1", {token: [path] for token, path in files.items()})[0].name == "worded/2"
    return load_release(store, "worded/2", detect_targets(), [], ColdStart())


@pytest.fixture(scope="module")
def reference(toy_folder: Path, files: dict[str, Path]) -> Reference:
    reference = Reference(toy_folder)
    pipeline = reference._base["text to image"]
    for token, path in files.items():
        first, second = read_embedding([path], 2)
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
    "longer than 77 tokens": ("a large red circle on a blue background " * 9 + "<cat>", {}),
    "no embedding": ("a large red circle", {}),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_images_are_those_of_diffusers(case: str, worded: Loaded, reference: Reference) -> None:
    prompt, fields = PROMPTS[case]
    params = params_of(worded, prompt, **fields)
    assert largest_difference(generate(worded.model, [params])[0][0], reference.generate(params)) <= TOLERANCE


@pytest.mark.parametrize("syntax", ["plain", "weighted"])
def test_capitals_mean_the_same_token(syntax: str, worded: Loaded) -> None:
    """Unlike in diffusers, which uses the first vector alone."""
    prompts = ("a photo of <cat> and <ink>", "A Photo of <CAT> and <Ink>")
    [lower], [upper] = (
        generate(worded.model, [params_of(worded, prompt, prompt_syntax=syntax)])[0] for prompt in prompts
    )
    assert largest_difference(lower, upper) == 0


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_warns_of_an_embedding_that_is_left_out(field: str, worded: Loaded) -> None:
    prompts = {"prompt": "a circle", "negative_prompt": "a square"}
    cut, without = ({**prompts, field: "circle " * 74 + last} for last in ("<cat>", ""))
    [image], _, warnings = generate(worded.model, [params_of(worded, **cut)])
    assert [warning.partition(";")[0] for warning in warnings] == [
        f"{field}: the text encoders read 77 tokens",
        f'{field}: the embedding "<cat>" was left out as a whole, because not all of its vectors fit. Write it '
        "earlier.",
    ]
    [expected], _, none = generate(worded.model, [params_of(worded, **without)])
    assert not none and largest_difference(image, expected) == 0


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
    one = tmp_path / "one.safetensors"
    save_file({"clip_l": torch.ones(2, WIDTH), "clip_g": torch.ones(2, WIDTH)}, one)
    with pytest.raises(BadEmbedding, match="worded/2 has no free row for 3 vectors: text_encoder has rows for 2 more"):
        add_embeddings(opened, "worded/2", {"<dog>": [files["<cat>"]]})
    manifest, is_new = add_embeddings(opened, "worded/2", {"<dog>": [one]}, key)
    assert is_new and add_embeddings(opened, "worded/2", {"<dog>": [one]}, key) == (manifest, False)
    assert manifest.name == "worded/3"
    assert json.loads(manifest.builder["embeddings"]).keys() == {*VECTORS, "<dog>"}
    again = load_release(opened, "worded/3", detect_targets(), [], ColdStart(), public_keys=[public_key(key)])
    [with_cat], [as_before] = (generate(loaded.model, [params_of(loaded, "a <cat>")])[0] for loaded in (again, worded))
    assert largest_difference(with_cat, as_before) == 0


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
    loaded = load_release(opened, "worded/9", detect_targets(), [], ColdStart())
    for prompt in ("a <CAT> on <ink>", "<cat>"):
        [image], [expected] = (generate(of.model, [params_of(of, prompt)])[0] for of in (loaded, worded))
        assert largest_difference(image, expected) == 0
    one = tmp_path / "one.safetensors"
    save_file({"clip_l": torch.ones(2, WIDTH), "clip_g": torch.ones(2, WIDTH)}, one)
    with pytest.raises(BadEmbedding, match="'<Cat>_1' is in the release's tokenizer already, as '<cat>_1'"):
        add_embeddings(opened, "worded/9", {"<Cat>_1": [one]})
    added, _ = add_embeddings(opened, "worded/9", {"<cat>_3": [one]})
    assert added.schema_version == 5
    assert {*(rows for record in added.tokenizers.values() for rows in (record.embeddings or {}).values())} == {
        tuple(range(first + 4, first + 6)) for first in {len(tokenizer.get_vocab()) - 4}
    }


def test_refuses_a_release_without_rows(toy_store: WritableStore, files: dict[str, Path], tmp_path: Path) -> None:
    opened = open_writable_store(copy_store(toy_store, tmp_path / "store"))
    with pytest.raises(BadEmbedding, match="has no free row for 1 vectors: text_encoder has rows for 0 more") as error:
        add_embeddings(opened, "toy-sdxl/1", {"<ink>": [files["<ink>"]]})
    assert "preheat build --embedding-rows" in str(error.value)
    assert opened.releases() == ["toy-sdxl/1"]


def test_refuses_tokens_of_the_vocabulary(store: WritableStore, worded: Loaded, files: dict[str, Path]) -> None:
    for token in ("a</w>", "<|endoftext|>"):
        with pytest.raises(BadEmbedding, match="is in the release's tokenizer already"):
            add_embeddings(store, "worded/1", {token: [files["<ink>"]]})
    with pytest.raises(BadEmbedding, match="'<cat>' is in the release's tokenizer already"):
        add_embeddings(store, "worded/2", {"<cat>": [files["<ink>"]]})
    assert store.releases() == ["worded/1", "worded/2"]


REFUSED_TOKENS = {
    "capitals": (["EasyNegative=one", "easynegative=one"], "'EasyNegative' and 'easynegative' are one for"),
    "accents": (["caf\u00e9=one", "cafe\u0301=one"], "'caf\u00e9' and 'cafe\u0301' are one for"),
    "the same": (["<x>=one", "<x>=one"], "The token '<x>' is given twice. Choose another token. Give a file for each"),
    "in the release": (["<CAT>=one"], "The token '<CAT>' is in the release's tokenizer already, as '<cat>'."),
    "in the vocabulary": (["<|EndOfText|>=one"], "is in the release's tokenizer already, as '<|endoftext|>'."),
    "divided": (["a<|endoftext|>=one"], "divides the token 'a<|endoftext|>' into 'a', '<|endoftext|>'. Choose"),
    "more vectors than a chunk": (
        ["<x>=many"],
        "The embedding of '<x>' has 76 vectors. A prompt is read in chunks of 75",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TOKENS)
def test_refuses_tokens_that_prompts_cannot_use(
    case: str, store: WritableStore, worded: Loaded, tmp_path: Path
) -> None:
    options, message = REFUSED_TOKENS[case]
    for name, count in (("one", 1), ("many", 76)):
        save_file({key: torch.ones(count, WIDTH) for key in ("clip_l", "clip_g")}, tmp_path / name)
    options = [option.replace("=", f"={tmp_path}/") for option in options]
    folder = copy_store(store, tmp_path / "store")
    result = CliRunner().invoke(app, ["add-embedding", "worded/2", *options, "--store", str(folder)])
    assert isinstance(result.exception, BadEmbedding) and message in str(result.exception)
    assert open_writable_store(folder).releases() == ["worded/1", "worded/2"]


def test_reads_a_file_for_each_text_encoder(
    store: WritableStore, worded: Loaded, files: dict[str, Path], tmp_path: Path
) -> None:
    """As `textual_inversion_sdxl.py` of diffusers writes them."""
    names = ("learned_embeds.safetensors", "learned_embeds_2.safetensors")
    for name, vectors in zip(names, read_embedding([files["<cat>"]], 2), strict=True):
        save_file({"<cat-toy>": vectors}, tmp_path / name)
    folder = copy_store(store, tmp_path / "store")
    option = f"<cat-toy>={tmp_path / names[0]},{tmp_path / names[1]}"
    result = CliRunner().invoke(app, ["add-embedding", "worded/1", option, "--store", str(folder)])
    assert result.exit_code == 0, result.output
    newest = open_writable_store(folder).releases()[-1]
    loaded = load_release(open_writable_store(folder), newest, detect_targets(), [], ColdStart())
    [image] = generate(loaded.model, [params_of(loaded, "a red <cat-toy>")])[0]
    [expected] = generate(worded.model, [params_of(worded, "a red <cat>")])[0]
    assert largest_difference(image, expected) == 0


def test_a_comma_may_be_in_the_name_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a,b.safetensors"
    path.touch()
    assert parse_embeddings([f"<x>={path}", "<y>=a,b"]) == {"<x>": (path,), "<y>": (Path("a"), Path("b"))}


FILES: dict[str, tuple[list[dict[str, torch.Tensor]], int, str]] = {
    "second encoder only": ([{"clip_g": torch.ones(1, 1280)}], 2, "has clip_g and lacks clip_l, the vectors of"),
    "older keys": ([{"text_encoders_0": torch.ones(1, 768)}], 2, "lacks text_encoders_1, the vectors of SDXL's second"),
    "of Stable Diffusion 1": (
        [{"emb_params": torch.ones(2, 768)}],
        2,
        "has the vectors of one text encoder only: emb_params, width 768 (SDXL's first text encoder or Stable "
        "Diffusion 1). SDXL has two. Give a file for each text encoder, in their order: TOKEN=FIRST.safetensors,",
    ),
    "of Stable Diffusion 2": ([{"emb_params": torch.ones(1024)}], 2, "emb_params, width 1024 (Stable Diffusion 2)"),
    "of SDXL for one encoder": (
        [{"clip_l": torch.ones(1, 768), "clip_g": torch.ones(1, 1280)}],
        1,
        "has clip_g, clip_l: an embedding for the two text encoders of SDXL. Expected one tensor",
    ),
    "two files for one encoder": ([{"<x>": torch.ones(1, 768)}] * 2, 1, "2 files were given for one token. The model"),
    "three files": ([{"<x>": torch.ones(1, 768)}] * 3, 2, "3 files were given for one token. The model has 2"),
    "whole files": ([{"clip_l": torch.ones(1, 768), "clip_g": torch.ones(1, 1280)}] * 2, 2, "Give that file alone"),
    "files of other numbers": ([{"<x>": torch.ones(1, 768)}, {"<x>": torch.ones(2, 1280)}], 2, "has 1 and 2 vectors"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_names_what_a_file_lacks(case: str, tmp_path: Path) -> None:
    tensors, encoders, message = FILES[case]
    paths = []
    for number, of_file in enumerate(tensors):
        paths.append(tmp_path / f"{number}.safetensors")
        save_file({name: tensor.clone() for name, tensor in of_file.items()}, paths[-1])
    with pytest.raises(BadEmbedding, match=re.escape(message)):
        read_embedding(paths, encoders)


TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "one encoder": ({"clip_l": torch.ones(1, WIDTH)}, "has clip_l and lacks clip_g, the vectors of SDXL's second"),
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
        read_embedding([path], 2)


def test_refuses_other_files(store: WritableStore, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x02")
    (tmp_path / "x.safetensors").write_bytes(b"\0" * 20)
    wide = tmp_path / "wide.safetensors"
    save_file({"clip_l": torch.ones(1, 768), "clip_g": torch.ones(1, 1280)}, wide)
    with pytest.raises(BadEmbedding, match="may hold a pickle, which can run code. It was not opened"):
        read_embedding([tmp_path / "x.pt"], 2)
    for name in ("x.safetensors", "missing.safetensors"):
        with pytest.raises(BadEmbedding, match="is not a complete safetensors file"):
            read_embedding([tmp_path / name], 2)
    with pytest.raises(
        BadEmbedding,
        match=r"vectors of width 768 .*, and text_encoder of release worded/1 has tokens of",
    ):
        add_embeddings(store, "worded/1", {"<x>": [wide]})


def test_reads_one_tensor_for_models_of_one_encoder(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"<cat-toy>": torch.ones(WIDTH).half()}, path)
    [vectors] = read_embedding([path], 1)
    assert vectors.shape == (1, WIDTH) and vectors.dtype == torch.float32


@pytest.mark.parametrize(
    "text", ["", "<x>", "<x>=", "<x>=a,", "<x>=,a", "=file", "two words=file", f"{'a' * 65}=file", "a\x00=file"]
)
def test_refuses_options_that_are_not_token_and_file(text: str) -> None:
    with pytest.raises(BadEmbedding, match="is not TOKEN=FILE"):
        parse_embeddings([text])


def test_the_command_publishes_the_next_version(store: WritableStore, files: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_store(store, tmp_path / "store")
    for result in ("Published", "Unchanged since"):
        arguments = ["add-embedding", "worded/1", f"<ink>={files['<ink>']}", "--store", str(folder)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        newest = open_writable_store(folder).releases()[-1]
        assert f"{result} {newest} with <ink>." in " ".join(done.output.split())


def test_a_plan_with_rows_has_other_text_encoders_only(toy_plan: BuildPlan) -> None:
    from engine_builder.networks.network import ModuleReader

    with_rows = replace(toy_plan, base=replace(toy_plan.base, embedding_rows=ROWS))
    for name in ("text_encoder", "text_encoder_2", "unet_text", "unet"):
        networks = [plan.load(name, ModuleReader()) for plan in (toy_plan, with_rows)]
        is_same = networks[0].architecture == networks[1].architecture
        assert is_same == name.startswith("unet")
