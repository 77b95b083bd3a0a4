"""Signatures: trusted releases load, others are refused. The commands that create and show signatures."""

import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from typer.testing import CliRunner

from engine_builder.releases import signing
from engine_builder.releases.mirror import copy_release
from engine_builder.releases.publish import publish
from engine_builder.stores.local import WritableLocalStore
from model.errors import ConfigError, EngineError, PreheatError, UntrustedRelease
from model.model import Model
from model.settings import read_settings
from model.store.manifest import SCHEMA_VERSION, Manifest
from model.store.manifest_json import parse_manifest
from model.store.signature import PublicKey, check_signature
from preheat import main as cli
from tests.support import releases
from tests.support.releases import RELEASE_NAME

Entries = dict[str, Any]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key.pem"
    signing.write_key(path)
    return path


@pytest.fixture
def public(key_file: Path) -> PublicKey:
    return signing.public_key(signing.read_key(key_file))


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    """A store with a draft of the toy, as after a build, and no release."""
    store = WritableLocalStore(tmp_path / "store")
    draft = releases.draft_release(store).model_copy(update={"version": "draft", "builder": {"source": "1"}})
    store.write_record("drafts", "toy.cpu.fp32", draft.to_json())
    return store


@pytest.fixture
def signed(store: WritableLocalStore, key_file: Path) -> Manifest:
    return publish(store, "toy", signing.read_key(key_file))[0]


def run(*arguments: object) -> tuple[int, str]:
    """Run a `preheat` command. Returns its exit status and its output or error."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, PreheatError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


# -- signing ------------------------------------------------------------------------------------------------------


def test_signature_survives_writing_and_copying(
    store: WritableLocalStore, signed: Manifest, public: PublicKey, tmp_path: Path
) -> None:
    """It ignores the formatting of JSON, and one of several trusted keys suffices."""
    copied, _ = copy_release(store, WritableLocalStore(tmp_path / "other"), RELEASE_NAME)
    assert copied == store.read_release(RELEASE_NAME) == signed
    entries = json.loads(signed.to_json())
    shuffled = json.dumps(dict(reversed(entries.items())), indent=5).encode()
    keys = [signing.write_key(tmp_path / "new.pem"), public]
    for manifest in (copied, parse_manifest(shuffled, RELEASE_NAME)):
        check_signature(manifest, keys)


def test_signature_is_ed25519_of_canonical_json(signed: Manifest, public: PublicKey) -> None:
    """This test verifies it without Preheat's code, as another program would."""
    entries = json.loads(signed.to_json())
    signature = entries.pop("signature")
    canonical = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    Ed25519PublicKey.from_public_bytes(public.raw).verify(
        base64.b64decode(signature["ed25519"]), b"preheat release\n" + canonical
    )


EDITS: dict[str, object] = {
    "engines.0.blob.sha256": "0" * 64,
    "weights.0.blobs.0.bytes": 7,
    "defaults.num_inference_steps": 5,
    "created": "2027-01-01T00:00:00+00:00",
    "engines.0.target": "cpu-x86_64_v1-torch2.13",
    "builder.surprise": "",
}


def test_refuses_every_change_after_signing(signed: Manifest, public: PublicKey) -> None:
    def refuse(entries: Entries) -> None:
        assert entries != intact
        with pytest.raises(UntrustedRelease, match="toy/1 does not match this manifest.*changed after signing.*--sign"):
            check_signature(parse_manifest(json.dumps(entries).encode(), RELEASE_NAME), [public])

    intact = json.loads(signed.to_json())
    for path, value in EDITS.items():
        entries = json.loads(signed.to_json())
        releases.set_entry(entries, path, value)
        refuse(entries)
    for key, change in {"engines": list.pop, "weights": list.reverse}.items():
        entries = json.loads(signed.to_json())
        change(entries[key])
        refuse(entries)
    entries = json.loads(signed.to_json())
    del entries["engines"][0]["bucket"]["rows"]["multiple"]  # the default
    refuse(entries)


def test_refuses_unsigned_release_and_another_key(store: WritableLocalStore, public: PublicKey, tmp_path: Path) -> None:
    manifest, _ = publish(store, "toy")
    assert "signature" not in json.loads(manifest.to_json())
    check_signature(manifest, [])
    with pytest.raises(UntrustedRelease, match=f"toy/1 is not signed.*signed by {public.key_id}.*--sign KEYFILE"):
        check_signature(manifest, [public])
    other = signing.write_key(tmp_path / "other.pem")
    signed = signing.sign(manifest, signing.read_key(tmp_path / "other.pem"))
    words = f"is signed by {other.key_id}. .*only .*{public.key_id}.*PREHEAT_PUBLIC_KEY"
    with pytest.raises(UntrustedRelease, match=words):
        check_signature(signed, [public])


# -- publishing ---------------------------------------------------------------------------------------------------


def test_publishes_again_only_for_a_missing_signature(
    store: WritableLocalStore, key_file: Path, tmp_path: Path
) -> None:
    key = signing.read_key(key_file)
    assert publish(store, "toy")[0].name == "toy/1"
    assert publish(store, "toy", key)[0].name == "toy/2"
    assert publish(store, "toy", key)[1] is False
    assert publish(store, "toy")[1] is False, "a signature that was not requested makes no difference"
    signing.write_key(tmp_path / "other.pem")
    assert publish(store, "toy", signing.read_key(tmp_path / "other.pem"))[0].name == "toy/3"


def test_key_is_written_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    code, output = run("keygen", path)
    assert code == 0 and stat.S_IMODE(path.stat().st_mode) == 0o600
    line = next(line for line in output.splitlines() if line.startswith("public_key: "))
    public = PublicKey.parse(line.removeprefix("public_key: "))
    assert public == signing.public_key(signing.read_key(path))
    before = path.read_bytes()
    assert b"PRIVATE KEY" in before and "PRIVATE KEY" not in output
    code, output = run("keygen", path)
    assert code == 1 and "exists, and releases may be signed with it. Name another file." in output
    assert path.read_bytes() == before


def pem(key: Any, encryption: Any) -> bytes:
    data = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    assert isinstance(data, bytes)
    return data


# Made for this test with `openssl ecparam -name secp112r1 -genkey`. cryptography does not support the curve.
UNSUPPORTED_CURVE = b"""-----BEGIN PRIVATE KEY-----
ME4CAQAwEAYHKoZIzj0CAQYFK4EEAAYENzA1AgEBBA7U6yUGtmp4V0xTPQ4//qEg
Ax4ABA8tdcw/HxBGSaiiqaA20t3SFqWHsSATpxp/JyY=
-----END PRIVATE KEY-----
"""

INVALID_KEYS: tuple[bytes | None, ...] = (
    None,  # no file
    b"",
    b"key",
    b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    pem(ec.generate_private_key(ec.SECP256R1()), serialization.NoEncryption()),
    UNSUPPORTED_CURVE,
    pem(Ed25519PrivateKey.generate(), serialization.BestAvailableEncryption(b"secret")),
)


def test_refuses_invalid_private_key(store: WritableLocalStore, tmp_path: Path) -> None:
    path = tmp_path / "bad.pem"
    for data in INVALID_KEYS:
        if data is not None:
            path.write_bytes(data)
        code, output = run("publish", "toy", "--store", store.root, "--sign", path)
        assert code == 1 and str(path) in output and "preheat keygen" in output, data
    assert store.releases() == []


def test_commands_name_the_signer(
    store: WritableLocalStore, key_file: Path, public: PublicKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = run("publish", "toy", "--store", store.root, "--sign", key_file)
    assert code == 0 and f"signed by {public.key_id}" in output.replace("\n", " ")
    assert run("publish", "toy/unsigned", "--store", store.root)[0] == 0
    other = signing.write_key(tmp_path / "other.pem")
    only_others = f"is signed by {public.key_id}. This deployment loads only releases signed by {other.key_id}."
    for arguments, expected, words in (
        (("toy/1",), 0, f"toy/1 is signed by {public.key_id} (not checked: give --public-key)"),
        (("toy/1", "--public-key", public), 0, f"toy/1 is signed by {public.key_id}\n"),
        (("--public-key", public), 1, "untrusted Release toy/unsigned is not signed"),
        (("toy/1", "--public-key", other), 1, only_others),
        (("toy/1", "--public-key", "ed25519:no"), 1, "'ed25519:no' is not a public key. Give the line that"),
    ):
        code, output = run("verify", *arguments, "--store", store.root)
        assert code == expected and words in output
    monkeypatch.setenv("PREHEAT_PUBLIC_KEY", str(public))
    assert run("verify", "toy/1", "--store", store.root)[0] == 0
    code, _ = run("verify", "toy/1", "--store", store.root, "--public-key", other)
    assert code == 1, "the option takes precedence over the environment"


def test_unreadable_release_hides_no_other(store: WritableLocalStore) -> None:
    """One of a newer schema, and a link to a missing file."""
    assert run("publish", "toy/good", "--store", store.root)[0] == 0
    folder = store.root / "releases" / "toy"
    newer, link = folder / "newer.json", folder / "link.json"
    manifest = json.loads((folder / "good.json").read_text())
    newer.write_text(json.dumps(manifest | {"schema_version": SCHEMA_VERSION + 1}))
    link.symlink_to(store.root / "unmounted" / "1.json")
    for command, shown in (("releases", "components"), ("verify", "blobs of 1 release are intact")):
        code, output = run(command, "--store", store.root)
        assert code == 1 and "toy/good" in output and shown in output and "toy/newer" in output
        assert "unreadable Release toy/link cannot be read" in output and "is a link to a missing file" in output
    newer.unlink()
    for command in (("verify", "toy/link"), ("gc", "--delete")):
        code, output = run(*command, "--store", store.root)
        assert code == 1 and output.startswith("Release toy/link cannot be read")
    link.unlink()
    assert run("releases", "--store", store.root)[0] == run("verify", "--store", store.root)[0] == 0


def test_control_codes_of_a_manifest_are_not_printed(store: WritableLocalStore) -> None:
    manifest = releases.draft_release(store).model_copy(update={"created": "\x1b[31m2026"})
    store.write_release(manifest)
    code, output = run("releases", "--store", store.root)
    assert code == 0 and "\x1b" not in output and "\N{REPLACEMENT CHARACTER}[31m2026" in output


# -- the key in the config ----------------------------------------------------------------------------------------


def test_environment_key_overrides_config_key(
    public: PublicKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREHEAT_PUBLIC_KEY", raising=False)
    other = signing.write_key(tmp_path / "other.pem")
    for empty in ("", None, []):
        assert read_settings().public_key == read_settings({"public_key": empty}).public_key == []
    assert read_settings({"public_key": str(public)}).public_key == [public]
    assert read_settings({"public_key": [str(public), str(other)]}).public_key == [public, other]
    assert read_settings({"public_key": f"{public}, {other}"}).public_key == [public, other]
    monkeypatch.setenv("PREHEAT_PUBLIC_KEY", str(other))
    assert read_settings({"public_key": str(public)}).public_key == [other]


def test_refuses_invalid_public_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREHEAT_PUBLIC_KEY", raising=False)
    for value in (
        " ", ",", "ed25519:", "ed25519:AAAA", "AAAA", False, 0, 7, {}, [""], [None],
        "ed25519:" + base64.b64encode(bytes(33)).decode(), "ed25519:" + "*" * 44, "x" * 10_000,
    ):  # fmt: skip
        words = "is not a public key. Give the line that `preheat keygen` prints"
        with pytest.raises(ConfigError, match=words) as caught:
            read_settings({"public_key": value})
        assert len(str(caught.value)) < 400


_PRIME = 2**255 - 19
_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")


def test_refuses_public_key_of_small_order() -> None:
    for y in (0, 1, _PRIME - 1, _PRIME, _PRIME + 1, _ORDER_8, _PRIME - _ORDER_8):
        for sign in (0, 2**255):
            with pytest.raises(ConfigError, match="small order"):
                PublicKey.parse(str(PublicKey((y + sign).to_bytes(32, "little"))))


def test_server_with_key_loads_only_signed_releases(
    store: WritableLocalStore, key_file: Path, public: PublicKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREHEAT_PUBLIC_KEY", "PREHEAT_STORE", "PREHEAT_RELEASE"):
        monkeypatch.delenv(name, raising=False)
    publish(store, "toy/unsigned")
    publish(store, "toy/signed", signing.read_key(key_file))

    def load_error(release: str, **settings: object) -> type[BaseException]:
        section = {"store": store.url, "release": release} | settings
        with pytest.raises(PreheatError) as caught:
            Model(config={"model_metadata": {"preheat": section}}).load()
        return type(caught.value)

    # A trusted release fails later, when its fake engine is opened.
    assert load_error("toy/unsigned") is load_error("toy/signed", public_key=str(public)) is EngineError
    assert load_error("toy/unsigned", public_key=str(public)) is UntrustedRelease
    monkeypatch.setenv("PREHEAT_PUBLIC_KEY", str(public))
    assert load_error("toy/unsigned") is UntrustedRelease
    for blob in (store.root / "blobs" / "sha256").iterdir():
        blob.unlink()
    assert load_error("toy/unsigned") is UntrustedRelease, "before any blob is read"
