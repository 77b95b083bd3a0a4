"""`preheat add-lora`: each key format gives the same factors, and unusable files are refused before any is stored."""

import json
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_builder.adapters.add import add_adapter, release_layers
from engine_builder.adapters.bad_adapter import BadAdapter
from engine_builder.adapters.names import LayerNames
from engine_builder.adapters.read import open_adapter, read_changes
from engine_builder.releases.gc import named_blobs
from engine_builder.releases.mirror import copy_adapter
from engine_builder.releases.signing import public_key, read_key, write_key
from engine_builder.stores.store import WritableStore, open_writable_store
from model.adapters.layers import Layer
from model.errors import AdapterError, AdapterExists, AdapterNotFound, ManifestError, UntrustedRelease
from model.store.adapter_record import parse_adapter
from model.store.signature import check_signature
from preheat import main as cli
from tests.conftest import Opener
from tests.support.adapters import LINEARS, module_shapes, random_deltas, write_adapter
from tests.support.repository import MODEL_FOLDER

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return module_shapes(MODEL_FOLDER)


@pytest.fixture(scope="module")
def layers(store: WritableStore, release: str) -> dict[str, Layer]:
    return release_layers(store, store.read_release(release))


@pytest.fixture
def writable(store: WritableStore, tmp_path: Path) -> WritableStore:
    """A copy of the store, without its weights."""
    folder = tmp_path / "store"
    source = Path(store.url.removeprefix("file://"))
    shutil.copytree(source / "releases", folder / "releases")
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for name in store.releases():
        for engine in store.read_release(name).engines:
            digest = engine.constants.sha256
            shutil.copy(source / "blobs" / "sha256" / digest, folder / "blobs" / "sha256" / digest)
    return open_writable_store(folder)


@pytest.fixture
def file(shapes: Shapes, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "style.safetensors", random_deltas(shapes, LINEARS, 4, seed=1), "kohya")


def test_release_has_the_layers_of_the_checkpoint(layers: dict[str, Layer]) -> None:
    assert {name: layer.shape for name, layer in layers.items()} == module_shapes(MODEL_FOLDER, vectors=True)


def test_names_of_stability_ai_are_sdxls() -> None:
    """Keys that kohya's scripts write for SDXL, whose blocks have two resnets, and the modules that they mean."""
    modules = {
        "input_blocks_4_1_transformer_blocks_0_ff_net_2": "down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2",
        "input_blocks_3_0_op": "down_blocks.0.downsamplers.0.conv",
        "input_blocks_1_0_in_layers_2": "down_blocks.0.resnets.0.conv1",
        "input_blocks_8_0_emb_layers_1": "down_blocks.2.resnets.1.time_emb_proj",
        "middle_block_1_proj_in": "mid_block.attentions.0.proj_in",
        "middle_block_2_out_layers_3": "mid_block.resnets.1.conv2",
        "output_blocks_2_1_proj_out": "up_blocks.0.attentions.2.proj_out",
        "output_blocks_2_2_conv": "up_blocks.0.upsamplers.0.conv",
        "output_blocks_5_0_skip_connection": "up_blocks.1.resnets.2.conv_shortcut",
        "time_embed_0": "time_embedding.linear_1",
        "label_emb_0_2": "add_embedding.linear_2",
        "out_2": "conv_out",
        "out_0": "conv_norm_out",
        "output_blocks_5_0_in_layers_0": "up_blocks.1.resnets.2.norm1",
    }
    known = [*modules.values(), "down_blocks.0.resnets.1.conv1"]
    names = LayerNames(Layer(f"unet.{module}", (8, 8), "unet", "x") for module in known)
    found = {key: names.find(f"lora_unet_{key}") for key in modules}
    assert {key: name and name.module for key, name in found.items()} == {k: f"unet.{m}" for k, m in modules.items()}


def test_doubles_are_read_as_floats(layers: dict[str, Layer], file: Path) -> None:
    expected = read_changes(open_adapter(file), layers)
    save_file({key: tensor.double() for key, tensor in load_file(file).items()}, file)
    for name, factors in read_changes(open_adapter(file), layers).items():
        assert factors.parts["down"].dtype == factors.parts["up"].dtype == torch.float32
        assert (
            torch.equal(factors.parts["down"], expected[name].parts["down"]) and factors.scale == expected[name].scale
        )


Change = Callable[[torch.Tensor], torch.Tensor]
REFUSED: dict[str, tuple[str, Change | None, str]] = {
    # name: (end of a key, what replaces the first tensor with this end, or None to leave out all; words of the error)
    "no up": (".lora_up.weight", None, "has no 'up' tensor"),
    "no down": (".lora_down.weight", None, "has no 'down' tensor"),
    "nothing": ("", None, "has no tensors"),
    "another width": (".lora_down.weight", lambda t: t[:, :-1], "the layer's tensor is .* another model"),
    "another height": (".lora_up.weight", lambda t: torch.cat([t, t]), "the layer's tensor is .* another model"),
    "large rank": (".lora_down.weight", lambda t: t.repeat(512, 1), "has rank 2048, expected 1 to 1024"),
    "rank 0": (".lora_down.weight", lambda t: t[:0], "has rank 0, expected 1 to 1024"),
    "NaN": (".lora_up.weight", lambda t: t * torch.nan, "'up' tensor has NaN or infinite"),
    "infinity": (".lora_down.weight", lambda t: t / 0, "'down' tensor has NaN or infinite"),
    "alpha NaN": (".alpha", lambda t: t * torch.nan, "invalid alpha"),
    "large alpha": (".alpha", lambda t: t + 1e9, "invalid alpha"),
    "three alphas": (".alpha", lambda t: torch.ones(3), "invalid alpha"),
    "integers": (".lora_up.weight", lambda t: t.to(torch.int8), "is I8, expected F16, BF16, F32 or F64"),
}
REFUSED_KEYS = {
    "lora_unet_conv_in.dora_scale": "conv_in has no tensors of an algorithm, only dora_scale",
    "lora_unet_conv_in.hada_w1_a": "conv_in has no 'hada_w1_b' tensor",
    "lora_unet_conv_in.lokr_w1": "conv_in has no 'lokr_w2' tensor",
    "lora_unet_conv_in.lora_mid.weight": "conv_in has tensors that no algorithm has together: mid",
    "lora_unet_conv_in.oft_blocks": "shows OFT, which is not supported",
    "lora_unet_conv_in.ia3_l": "shows PEFT's IA3, which is not supported",
    "lora_unet_conv_in.diff": "full differences tensors of the shapes diff .* another model",
    "lora_unet_conv_in.w_norm": "has a difference of its weight, and this model's layer has none",
    "lora_unet_conv_norm_out.lora_up.weight": "conv_norm_out is a norm, and has tensors of a linear: up",
    "lora_unet_conv_norm_out.b_norm": "difference of its bias of the shape .* another model",
    "lora_unet_conv_in.alpha": "conv_in has no tensors of an algorithm, only alpha",
    "lora_unet_input_blocks_99_1_proj_in.lora_down.weight": "has no layer for .* another model",
    "unet.nothing.lora_A.weight": "has no layer for .* another model",
    "__class__": "the key format of '__class__' is unknown",
}


def test_refuses_unusable_tensors(writable: WritableStore, file: Path) -> None:
    """Nothing is stored."""
    before = {digest for digest, _, _ in writable.blobs()}
    tensors = load_file(file)
    cases = [({**tensors, key: torch.zeros(4, 4)}, message) for key, message in REFUSED_KEYS.items()]
    for end, change, message in REFUSED.values():
        if change is None:
            cases.append(({key: tensor for key, tensor in tensors.items() if not key.endswith(end)}, message))
        else:
            key = next(key for key in sorted(tensors) if key.endswith(end))
            cases.append(({**tensors, key: change(tensors[key])}, message))
    for changed, message in cases:
        save_file({key: tensor.contiguous() for key, tensor in changed.items()}, file)
        with pytest.raises(BadAdapter, match=message):
            add_adapter(writable, "style", file)
    assert writable.adapters() == {} and {digest for digest, _, _ in writable.blobs()} == before


HUGE: dict[str, dict[str, tuple[int, ...]]] = {
    "LoKr tensors of the shapes lokr_w1_a .* another model": {
        "lokr_w1_a": (50_000, 1), "lokr_w1_b": (1, 50_000), "lokr_w2": (1, 1)
    },
    "LoRA tensors of the shapes .* another model": {
        "lora_mid.weight": (9000, 4, 3, 3), "lora_down.weight": (4, 64, 1, 1), "lora_up.weight": (64, 9000, 1, 1)
    },
    "has rank 5000, expected 1 to 1024": {
        "hada_w1_a": (64, 2), "hada_w1_b": (2, 576), "hada_w2_a": (64, 5000), "hada_w2_b": (5000, 576)
    },
    "has two differences of its weight": {"w_norm": (64,), "diff": (64,)},
}  # fmt: skip


def test_small_files_make_no_huge_products(layers: dict[str, Layer], tmp_path: Path) -> None:
    """The shapes are compared before factors are multiplied."""
    path = tmp_path / "a.safetensors"
    for message, shapes in HUGE.items():
        module = "conv_norm_out" if "w_norm" in shapes else "up_blocks_2_resnets_0_conv2"
        save_file({f"lora_unet_{module}.{key}": torch.zeros(shape) for key, shape in shapes.items()}, path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(BadAdapter, match=message):
            read_changes(open_adapter(path), layers)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_refuses_what_is_not_safetensors(writable: WritableStore, tmp_path: Path) -> None:
    for suffix, message in ((".ckpt", "may hold a pickle"), (".safetensors", "is not a safetensors file")):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(pickle.dumps({"lora_unet_conv_in.alpha": 1}))
        with pytest.raises(BadAdapter, match=message):
            add_adapter(writable, "style", path)
    with pytest.raises(BadAdapter, match="cannot be read: No such file"):
        add_adapter(writable, "style", tmp_path / "missing.safetensors")
    with pytest.raises(BadAdapter, match="conv_in has no magnitude, and PEFT's option use_dora is true"):
        (tmp_path / "adapter_config.json").write_text('{"use_dora": true}')
        factors = {"conv_in.lora_A.weight": torch.zeros(1, 4, 3, 3), "conv_in.lora_B.weight": torch.zeros(64, 1, 1, 1)}
        save_file(factors, tmp_path / "adapter_model.safetensors")
        add_adapter(writable, "style", tmp_path)


@pytest.fixture
def other_file(shapes: Shapes, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "other.safetensors", random_deltas(shapes, LINEARS, 4, seed=2), "kohya")


def test_record_is_written_once(writable: WritableStore, file: Path, other_file: Path, release: str) -> None:
    record, fitting, is_new = add_adapter(writable, "style", file)
    assert is_new and fitting == release and writable.adapters().keys() == {"style"}
    assert writable.read_adapter("style") == record == parse_adapter(record.to_json(), "style")
    assert add_adapter(writable, "style", file) == (record, release, False)
    with pytest.raises(AdapterExists, match="another adapter style.*Choose another name"):
        add_adapter(writable, "style", other_file)
    assert {blob.sha256 for blob in record.blobs} <= named_blobs(writable)


def test_adapter_is_copied_to_a_bucket_and_back(
    open_bucket: Opener, writable: WritableStore, file: Path, other_file: Path, tmp_path: Path
) -> None:
    write_key(tmp_path / "key.pem")
    record, _, _ = add_adapter(writable, "style", file, key=read_key(tmp_path / "key.pem"))
    remote, back = open_bucket(), open_writable_store(tmp_path / "back")
    assert copy_adapter(writable, remote, "style") == (record, True)
    assert copy_adapter(remote, back, "style") == (record, True)
    assert copy_adapter(writable, remote, "style") == (record, False)
    for blob in record.blobs:
        assert back.get(blob.sha256, blob.bytes).read_bytes() == writable.get(blob.sha256, blob.bytes).read_bytes()
    with pytest.raises(AdapterNotFound, match="Available: style"):
        copy_adapter(writable, remote, "other")
    (tmp_path / "store" / "adapters" / "style.json").unlink()
    add_adapter(writable, "style", other_file)
    with pytest.raises(AdapterExists, match="another adapter style"):
        copy_adapter(writable, remote, "style")
    assert remote.read_adapter("style") == record


def test_remove_lora_deletes_the_record(writable: WritableStore, file: Path, open_bucket: Opener) -> None:
    record, _, _ = add_adapter(writable, "style", file)
    remote = open_bucket()
    copy_adapter(writable, remote, "style")
    remote.delete_adapter("style")
    result = CliRunner().invoke(cli.app, ["remove-lora", "style", "--store", writable.url])
    assert result.exit_code == 0 and "Removed style" in result.output
    for store in (writable, remote):
        assert store.adapters() == {} and store.has(record.blobs[0].sha256)
    with pytest.raises(AdapterNotFound, match="Adapter style was not found"):
        writable.delete_adapter("style")


def test_commands_list_verify_and_copy_adapters(writable: WritableStore, file: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, arguments)
        return result.exit_code, " ".join(result.output.split())

    record, _, _ = add_adapter(writable, "style", file)
    layers = f"{len(record.layers)} layers of rank 4"
    code, output = run("releases", "--store", writable.url)
    assert code == 0 and f"style adapter, {layers}" in output and output.endswith("not signed")
    assert run("verify", "style", "--store", writable.url) == (
        0,
        "style is not signed 1 of 1 blobs of 1 adapter are intact.",
    )
    other = f"file://{tmp_path}/other"
    code, output = run("copy", "style", "--from", writable.url, "--store", other)
    assert code == 0 and output.startswith(f"Copied style to {other}: 1 MiB")
    assert "already exists" in run("copy", "style", "--from", writable.url, "--store", other)[1]
    blob = tmp_path / "other" / "blobs" / "sha256" / record.blobs[0].sha256
    blob.chmod(0o600)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    code, output = run("verify", "--store", other)
    assert code == 1 and "damaged Blob" in output and "0 of 1 blobs of 1 adapter are intact." in output
    (tmp_path / "other" / "adapters" / "style.json").write_text("{}")
    for command in ("verify", "releases"):
        code, output = run(command, "--store", other)
        assert code == 1 and "unreadable The record of adapter style is damaged" in output


def test_add_lora_names_what_is_left_out(writable: WritableStore) -> None:
    bundle = Path(__file__).parent / "cases" / "lora-bundled-embedding.safetensors"
    result = CliRunner().invoke(cli.app, ["add-lora", "style", str(bundle), "--store", writable.url])
    output = " ".join(result.output.split())
    assert result.exit_code == 0 and "Added style, 4 layers of rank 4" in output
    assert "warning" in output and "which were left out: myface" in output and "--embeddings MODEL/VERSION" in output
    assert writable.adapters().keys() == {"style"}


def test_missing_adapter_names_the_others(writable: WritableStore, file: Path) -> None:
    add_adapter(writable, "style", file)
    with pytest.raises(AdapterNotFound, match="Adapter other was not found.*Available: style.*add-lora"):
        writable.read_adapter("other")
    with pytest.raises(AdapterNotFound, match="not the name of an adapter"):
        writable.read_adapter("../releases/x")


def test_record_is_signed(writable: WritableStore, file: Path, tmp_path: Path) -> None:
    public, other = write_key(tmp_path / "key.pem"), write_key(tmp_path / "other.pem")
    key = read_key(tmp_path / "key.pem")
    assert public_key(key) == public
    record, _, _ = add_adapter(writable, "style", file, key=key)
    check_signature(writable.read_adapter("style"), [public])
    with pytest.raises(UntrustedRelease, match="Adapter style is signed by"):
        check_signature(record, [other])
    with pytest.raises(UntrustedRelease, match="Adapter style is not signed"):
        check_signature(record.model_copy(update={"signature": None}), [public])
    name, layer = next(iter(record.layers.items()))
    signed = json.loads(record.signed_bytes().partition(b"{")[2].join([b"{", b""]))
    assert signed["layers"][name].keys() == {"rank", "scale", "shape"}, "signatures of earlier versions must hold"
    changed = record.layers | {name: layer.model_copy(update={"scale": 2.0})}
    with pytest.raises(UntrustedRelease, match="signature of adapter style does not match this record"):
        check_signature(record.model_copy(update={"layers": changed}), [public])


def test_names_the_signature_of_the_same_adapter(
    writable: WritableStore, file: Path, other_file: Path, tmp_path: Path
) -> None:
    public, _ = write_key(tmp_path / "key.pem"), write_key(tmp_path / "other.pem")
    key, other = read_key(tmp_path / "key.pem"), read_key(tmp_path / "other.pem")
    add_adapter(writable, "plain", file)
    with pytest.raises(AdapterExists, match="has this adapter plain already, not signed.*delete adapters/plain.json"):
        add_adapter(writable, "plain", file, key=key)
    add_adapter(writable, "style", file, key=key)
    with pytest.raises(AdapterExists, match=f"has this adapter style already, signed by {public.key_id}.*another name"):
        add_adapter(writable, "style", file, key=other)
    assert add_adapter(writable, "style", file)[2] is add_adapter(writable, "style", file, key=key)[2] is False
    with pytest.raises(AdapterExists, match="has another adapter style"):
        add_adapter(writable, "style", other_file, key=other)


def test_unreadable_release_blocks_no_adapter(
    writable: WritableStore, file: Path, release: str, tmp_path: Path
) -> None:
    folder = tmp_path / "store" / "releases"
    newer = folder / "zoo" / "1.json"  # tried before the release that fits
    newer.parent.mkdir()
    newer.write_text("{}")
    (folder / "zoo" / "2.json").symlink_to(tmp_path / "unmounted" / "2.json")
    assert add_adapter(writable, "style", file)[1] == release
    with pytest.raises(ManifestError, match="zoo/1"):
        add_adapter(writable, "style", file, "zoo/1")
    shutil.rmtree(folder / release.partition("/")[0])
    with pytest.raises(BadAdapter, match="fits no release of .* that can be read.*zoo/2.*zoo/1.*preheat verify"):
        add_adapter(writable, "other", file)


def test_refuses_damaged_record(writable: WritableStore, file: Path) -> None:
    record, _, _ = add_adapter(writable, "style", file)
    layer: dict[str, object] = {"rank": 4, "scale": 1.0, "shape": [4, 4]}
    full: dict[str, object] = {"form": "matrix", "parts": {"full": [4, 4]}, "scale": 1.0, "shape": [4, 4]}
    cases: list[tuple[dict[str, object], str]] = [
        ({"name": "other"}, "is that of other"),
        ({"extra": 1}, "damaged at extra"),
        ({"schema_version": 3}, "damaged at schema_version"),
        ({"layers": {}}, "damaged at layers"),
        ({"layers": {"unet.x": layer | {"rank": 2000}}}, "damaged at layers.unet.x.rank"),
        ({"layers": {"unet.x": layer | {"rank": None}}}, "damaged at layers.unet.x"),
        ({"layers": {"unet.x": layer | {"form": "gain"}}}, "damaged at layers.unet.x"),
        ({"layers": {"unet.x": {**full, "rank": 4}}}, "damaged at layers.unet.x"),
        ({"layers": {"unet.x": full | {"parts": {"full": [4, 5]}}}}, "damaged at layers.unet.x"),
        ({"layers": {"unet.x": full | {"parts": {"down": [2, 4], "up": [4, 2]}}}}, "damaged at layers.unet.x"),
        ({"layers": {"unet.x": full | {"form": "hadamard"}}}, "damaged at layers.unet.x"),
        ({"layers": {"../x": layer}}, "damaged at layers"),
    ]
    for change, message in cases:
        with pytest.raises(AdapterError, match=message):
            parse_adapter(json.dumps(json.loads(record.to_json()) | change).encode(), "style")
    with pytest.raises(AdapterError, match="is not JSON"):
        parse_adapter(record.to_json()[:-1], "style")
