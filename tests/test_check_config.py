"""`preheat check-config`: each mistake of a config is refused before a push, with its fix."""

import re
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from engine_builder.commands.main import app
from engine_builder.releases.signing import public_key
from engine_builder.stores.store import WritableStore, open_writable_store
from model.store.manifest import Manifest, Span

ROOT = Path(__file__).resolve().parents[1]
CPU_DEMO = ROOT / "truss" / "configs" / "cpu-demo.yaml"
GPU_CONFIGS = [ROOT / "config.yaml", *sorted((ROOT / "truss" / "configs").glob("[!c]*.yaml"))]


def check(config: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-config", str(config), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, re.sub(r"\s+", " ", result.output)


@pytest.fixture(scope="module")
def gpu_store(store: WritableStore, release: str, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the tiny release as if it had been built for an H100 at 1024x1024, with batches up to 16."""
    manifest = store.read_release(release)
    size = Span(min=1024, max=1024)

    def for_gpu(engine: object) -> object:
        bucket = engine.bucket  # type: ignore[attr-defined]
        if bucket.height is not None:
            bucket = bucket.model_copy(update={"height": size, "width": size})
        return engine.model_copy(  # type: ignore[attr-defined]
            update={"target": "cuda-h100-sm90-torch2.11-cu130", "bucket": bucket}
        )

    settings = manifest.settings.model_copy(update={"native_height": 1024, "native_width": 1024})
    engines = tuple(for_gpu(engine) for engine in manifest.engines)
    changed = manifest.model_copy(update={"engines": engines, "settings": settings})
    gpu = open_writable_store(tmp_path_factory.mktemp("gpu-store"))
    for digest, blob in changed.blobs().items():
        gpu.put(store.get(digest, blob.bytes))
    gpu.write_release(Manifest.model_validate_json(changed.to_json()))
    return gpu


def edited(source: Path, folder: Path, **changes: object) -> Path:
    """A copy of a config with entries of model_metadata.preheat changed, or with `requirements` or `secrets`."""
    config = yaml.safe_load(source.read_text())
    for name in ("requirements", "secrets", "resources"):
        if name in changes:
            config[name] = changes.pop(name)
    config["model_metadata"]["preheat"] |= changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_accepts_the_demo_and_lists_what_it_serves(store: WritableStore, release: str, tmp_path: Path) -> None:
    code, output = check(edited(CPU_DEMO, tmp_path, store=store.url, release=release))
    assert code == 0 and "refused" not in output
    assert f"release {release}, not signed" in output and "target cpu-x86_64" in output
    assert "sides from 64 to 1024 pixels in steps of 32" in output and "MiB at a cold start" in output
    assert "warning The config has no public_key" in output


def test_accepts_a_gpu_release_of_the_pinned_torch(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    config = edited(ROOT / "config.yaml", tmp_path, store=gpu_store.url, release=release)
    code, output = check(config)
    assert code == 0, output
    assert "target cuda-h100-sm90-torch2.11-cu130" in output and "sizes 1024x1024" in output


@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda path: path.stem)
def test_refuses_the_placeholder_of_every_shipped_config(config: Path) -> None:
    code, output = check(config)
    assert code == 1 and "The store s3://preheat-releases is a placeholder. Name your own" in output


TORCH_213 = ["torch==2.13.0+cu130"]
REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "no store": ({"store": ""}, r"No store is configured\. Set model_metadata\.preheat\.store"),
    "no release": ({"release": ""}, r"No release is configured"),
    "unpublished": ({"release": "tiny-sdxl/never"}, r"Release tiny-sdxl/never was not found in file://.*tiny-sdxl/"),
    "odd name": ({"release": "../x"}, r"not the name of a release|is not a release"),
    "odd store": ({"store": "http://example.com"}, r"is not the URL of a store"),
    "unknown setting": ({"publik_key": "x"}, r"model_metadata\.preheat\.publik_key"),
    "invalid key": ({"public_key": "ed25519:x"}, r"is not a public key"),
    "untrusted": ({"public_key": str(public_key(Ed25519PrivateKey.generate()))}, r"is not signed"),
    "other torch": (
        {"requirements": TORCH_213},
        r"The config pins torch2\.13-cu130, and release .*-torch2\.11-cu130\. Pin",
    ),
    "torch not pinned": ({"requirements": ["torch>=2"]}, r"do not pin torch"),
    "size not built": (
        {"buckets": [{"height": 512, "width": 512, "rows": 2}]},
        r"has no \w+ engine for 512x512 with 2 rows on cuda-h100.*preheat build --size 512x512@2",
    ),
    "other GPU": (
        {"resources": {"accelerator": "L4", "use_gpu": True}},
        r"has no engine for the L4\. It has engines for cuda-h100-sm90-torch2\.11-cu130\. Build on that GPU",
    ),
    "secret in the file": ({"secrets": {"aws_access_key_id": "AKIA"}}, r"holds a value for the secret aws_access"),
}


@pytest.mark.parametrize("changes, message", REFUSALS.values(), ids=REFUSALS)
def test_refuses_a_mistake_with_its_fix(
    changes: dict[str, object], message: str, gpu_store: WritableStore, release: str, tmp_path: Path
) -> None:
    base: dict[str, object] = {"store": gpu_store.url, "release": release}
    code, output = check(edited(ROOT / "config.yaml", tmp_path, **(base | changes)))
    assert code == 1 and re.search(f"refused .*(?:{message})", output), output


def test_reports_every_mistake_at_once(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    config = edited(
        ROOT / "config.yaml", tmp_path, store="", release=release, requirements=["torch"], secrets={"token": "x"}
    )
    code, output = check(config)
    assert code == 1 and output.count("refused") == 3
    code, output = check(config, "--store", gpu_store.url)
    assert code == 1 and output.count("refused") == 2


@pytest.mark.parametrize("content", [b"", b"a: [", b"\xff\xfe", b"model_name: x\nunknown_key: 1\n", b"[" * 5000])
def test_refuses_what_is_not_a_truss_config(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    code, output = check(tmp_path / "config.yaml")
    assert code == 1 and "refused" in output
    for odd in (tmp_path, tmp_path / "missing.yaml"):
        code, output = check(odd)
        assert code == 1 and "is not a Truss config" in output
