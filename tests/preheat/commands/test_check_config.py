"""`preheat check-config`: each mistake of a config is refused before a push, with its fix."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from engine_builder.adapters.add import add_adapter
from engine_builder.releases.mirror import copy_release
from engine_builder.releases.signing import public_key, sign
from engine_builder.stores.store import WritableStore, open_writable_store
from model.store.manifest import EngineRecord, Manifest, Span, TensorRTPlan
from preheat.main import app
from tests.conftest import Opener
from tests.support import object_store as ceph
from tests.support.adapter_model import put_adapter
from tests.support.adapters import LINEARS, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.http_server import HttpServer, QuietHandler
from tests.support.object_store import ObjectStore
from tests.support.repository import REPOSITORY

PRODUCTION = REPOSITORY / "config.yaml"
CPU_DEMO = REPOSITORY / "truss" / "configs" / "cpu-demo.yaml"
KEY = Ed25519PrivateKey.generate()
GPU_CONFIGS = [PRODUCTION, *sorted((REPOSITORY / "truss" / "configs").glob("[!c]*.yaml"))]


def check(config: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-config", str(config), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, re.sub(r"\s+", " ", result.output)


@pytest.fixture(scope="module")
def gpu_store(store: WritableStore, release: str, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the tiny release, its engines renamed as if built for an H100 at 1024x1024 with batches up to 16.

    Also published: tiny-sdxl/plans with TensorRT plans for every sm90, tiny-sdxl/rtx with plans of TensorRT-RTX for
    sm80, sm86 and sm89, and tiny-sdxl/signed.
    """
    manifest = store.read_release(release)
    settings = manifest.settings.model_copy(update={"native_height": 1024, "native_width": 1024})
    manifest = manifest.model_copy(update={"settings": settings})
    gpu = open_writable_store(tmp_path_factory.mktemp("gpu-store"))
    for digest, blob in manifest.blobs().items():
        gpu.put(store.get(digest, blob.bytes))
    engines = tuple(for_gpu(engine, "cuda-h100-sm90-torch2.11-cu130") for engine in manifest.engines)
    plans = tuple(as_plan(for_gpu(engine, "cuda-sm90-trt11.4")) for engine in manifest.engines)
    built = manifest.model_copy(update={"engines": engines})
    for changed in (
        built,
        manifest.model_copy(update={"engines": plans, "version": "plans"}),
        manifest.model_copy(update={"engines": rtx_plans(manifest), "version": "rtx"}),
        sign(built.model_copy(update={"version": "signed"}), KEY),
    ):
        gpu.write_release(Manifest.model_validate_json(changed.to_json()))
    return gpu


def for_gpu(engine: EngineRecord, target: str) -> EngineRecord:
    bucket, size = engine.bucket, Span(min=1024, max=1024)
    if bucket.height is not None:
        bucket = bucket.model_copy(update={"height": size, "width": size})
    return engine.model_copy(update={"target": target, "bucket": bucket})


def as_plan(engine: EngineRecord) -> EngineRecord:
    plan = TensorRTPlan(profile=0, literals=engine.constants, onnx=engine.constants, refit="any", workspace_bytes=0)
    return engine.model_copy(update={"runtime": "tensorrt", "runtime_version": "11.4.0.106", "tensorrt": plan})


def rtx_plans(manifest: Manifest) -> tuple[EngineRecord, ...]:
    """Return engines that hold the manifest's weights, each for three targets."""
    weights = {record.component: record.identity for record in manifest.weights}
    plans = []
    for number, capability in enumerate(("sm80", "sm86", "sm89")):
        for engine in manifest.engines:
            plan = as_plan(for_gpu(engine, f"cuda-{capability}-rtx1.7"))
            assert plan.tensorrt is not None
            holder = plan.tensorrt.model_copy(
                update={"refit": "none", "weights": weights[engine.component], "workspace_bytes": None}
            )
            changes = {"runtime": "tensorrt-rtx", "runtime_version": "1.7.1.116", "tensorrt": holder, "accuracy": None}
            plans.append(plan.model_copy(update=changes | {"key": f"{number}{engine.key[1:]}"}))
    return tuple(plans)


def edited(folder: Path, source: Path = PRODUCTION, **changes: object) -> Path:
    """Copy a config with changed entries of model_metadata.preheat, or of the config itself (those named below)."""
    config = yaml.safe_load(source.read_text())
    for name in ("requirements", "secrets", "resources", "environment_variables"):
        if name in changes:
            config[name] = changes.pop(name)
    config["model_metadata"]["preheat"] |= changes
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def test_accepts_the_demo_and_lists_what_it_serves(store: WritableStore, release: str, tmp_path: Path) -> None:
    code, output = check(edited(tmp_path, CPU_DEMO, store=store.url, release=release))
    assert code == 0 and "refused" not in output
    assert f"release {release}, not signed" in output and "target cpu-x86_64" in output
    assert "sides from 64 to 1024 pixels in steps of 32" in output and "MiB at a cold start" in output
    assert re.search(r"memory\s+[1-9]\d* MiB \(an estimate", output)
    assert "warning The config has no public_key" in output


Changes = dict[str, object]
H100 = ["torch==2.11.0+cu130"]
TRT = "tensorrt-cu13==11.4.0.106"
RTX = "tensorrt-rtx-cu13-bindings==1.7.1.116"
AOT_TARGET = "target cuda-h100-sm90-torch2.11-cu130"


def on(accelerator: str) -> Changes:
    return {"resources": {"accelerator": accelerator, "use_gpu": True}}


def plans(runtime: str = "tensorrt", pin: str | None = TRT, **changes: object) -> Changes:
    """Return the changes of a config for TensorRT, whose plans tiny-sdxl/plans has."""
    pins = [*H100, pin] if pin else H100
    return {"release": "tiny-sdxl/plans", "runtime": runtime, "requirements": pins} | changes


def rtx(accelerator: str, pin: str | None = RTX, **changes: object) -> Changes:
    """Return the changes of a config that serves tiny-sdxl/rtx on a GPU."""
    return plans("tensorrt-rtx", pin, release="tiny-sdxl/rtx") | on(accelerator) | changes


ACCEPTED: dict[str, tuple[Changes, str]] = {
    "as shipped": ({}, f"{AOT_TARGET} sizes 1024x1024@16 "),
    "smaller batch": ({"buckets": [{"height": 1024, "width": 1024, "rows": 4}]}, "sizes 1024x1024@4 "),
    "signed": (
        {"release": "tiny-sdxl/signed", "public_key": str(public_key(KEY))},
        f"release tiny-sdxl/signed, signed by {public_key(KEY).key_id}",
    ),
    "torch without its build": (
        {"requirements": ["torch==2.11.0"]}, "warning The pin torch==2.11.0 does not name a CUDA build"
    ),
    "TensorRT": (plans(), "target cuda-sm90-trt11.4"),
    "fastest runtime": ({"runtime": "fastest"}, AOT_TARGET),
    "fastest runtime, TensorRT not supported": (
        {"runtime": "fastest", "requirements": [*H100, "tensorrt-cu13==10.3.0"]}, AOT_TARGET
    ),
    "fastest runtime, only plans": (plans("fastest"), "target cuda-sm90-trt11.4"),
    "TensorRT-RTX for an A10G": (rtx("A10G"), "target cuda-sm86-rtx1.7 sizes 1024x1024@16 "),
    "TensorRT-RTX for an A100 of 40 GB": (rtx("A100_40GB"), "target cuda-sm80-rtx1.7"),
    "fastest runtime, only plans of TensorRT-RTX": (rtx("L4", runtime="fastest"), "target cuda-sm89-rtx1.7"),
    "two GPUs for each image": ({"gpus_per_image": 2, **on("H100:2")}, AOT_TARGET),
    "environment variable": (
        {"release": "tiny-sdxl/never", "environment_variables": {"PREHEAT_RELEASE": "tiny-sdxl/signed"}},
        "release tiny-sdxl/signed",
    ),
}  # fmt: skip


def test_accepts_gpu_releases(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    for name, (changes, line) in ACCEPTED.items():
        code, output = check(edited(tmp_path, **{"store": gpu_store.url, "release": release, **changes}))
        assert code == 0 and "refused" not in output and line in output, (name, output)
        assert ("warning The config has no public_key" in output) == ("public_key" not in changes), name


def test_warns_of_rows_that_no_engine_fills(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    outputs = []
    for rows in (16, 32):
        buckets = [{"height": 1024, "width": 1024, "rows": rows}]
        code, output = check(edited(tmp_path, store=gpu_store.url, release=release, buckets=buckets))
        assert code == 0, output
        outputs.append(output)
    message = f"The config has 32 rows at 1024x1024, and the largest batch of {release} is 16: 8 guided images at once."
    assert message not in outputs[0] and message in outputs[1]


def test_warns_of_requests_that_truss_holds_back(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    path = edited(tmp_path, store=gpu_store.url, release=release)
    assert "predict_concurrency" not in check(path)[1]
    config = yaml.safe_load(path.read_text())
    config["runtime"]["predict_concurrency"] = 1
    path.write_text(yaml.safe_dump(config))
    code, output = check(path)
    assert code == 0 and "warning runtime.predict_concurrency is 1, and limits.max_queue 64" in output


def test_checks_several_releases(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    own = open_writable_store(copy_store(gpu_store, tmp_path / "store"))
    manifest = own.read_release(release)
    changes = {"version": "9", "architectures": manifest.architectures | {"unet": "0" * 64}}
    own.write_release(manifest.model_copy(update=changes))

    def check_releases(*names: str, **changes: object) -> tuple[int, str]:
        config = edited(tmp_path, store=own.url, release=None, releases=[*names], **changes)
        return check(config)

    code, output = check_releases(release, "tiny-sdxl/signed")
    assert code == 0, output
    assert f"release {release}, not signed" in output and "release tiny-sdxl/signed, signed by" in output
    first, rest, all_slots = (int(size) for size in re.findall(r"(\d+) MiB (?=for)", output))
    assert "memory" in output and "for 2 of 2 at once" in output
    assert 0 <= rest < first and all_slots == pytest.approx(first + rest, abs=1), "they share all weights"
    code, output = check_releases(release, "tiny-sdxl/signed", weight_slots=1)
    assert f"{first} MiB for 1 of 2 at once" in output
    code, output = check_releases(release)
    assert code == 0 and "at once" not in output
    code, output = check_releases(release, "tiny-sdxl/9", "tiny-sdxl/plans")
    assert code == 1 and f"{release} and tiny-sdxl/9 cannot share a server" in output
    assert "Release tiny-sdxl/plans" in output  # each is refused by its name
    code, output = check_releases(release, "tiny-sdxl/signed", public_key=str(public_key(KEY)))
    assert code == 1 and f"{release} is not signed" in output and "tiny-sdxl/signed is not" not in output
    code, output = check_releases("missing/*")
    assert code == 1 and "Release missing/* was not found in" in output


def test_reads_a_release_from_a_bucket(
    gpu_store: WritableStore,
    release: str,
    object_store: ObjectStore,
    open_bucket: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = open_bucket()
    settings = {"store": bucket.url, "release": release, "endpoint": object_store.url, "region": "us-east-1"}
    config = edited(tmp_path, **settings)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph.SECRET_KEY)
    code, output = check(config)
    assert code == 1 and f"Release {release} was not found in {bucket.url}" in output
    copy_release(gpu_store, bucket, release)
    code, output = check(config)
    assert code == 0 and "sizes 1024x1024@16 " in output, output
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    code, output = check(config)
    assert code == 1 and bucket.url in output


def test_ignores_settings_of_this_machine(
    gpu_store: WritableStore, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_STORE", gpu_store.url)
    monkeypatch.setenv("PREHEAT_RELEASE", release)
    code, output = check(edited(tmp_path, store="", release=""))
    assert code == 1 and "No store is configured. Set model_metadata.preheat.store in the config, or check" in output
    assert "with --store. A replica does not have this machine's variables." in output
    assert "PREHEAT_STORE" not in output, "a fix that does not help"


def test_refuses_a_relative_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    for path, in_config in (("store", True), ("./store", False), ("~/store", True)):
        variables = {} if in_config else {"PREHEAT_STORE": path}
        config = edited(tmp_path, store=path if in_config else "", release="a/1", environment_variables=variables)
        code, output = check(config)
        assert code == 1 and f"The store {path} is a relative path" in output
        assert "Name s3://bucket/prefix, or" in output
        _, output = check(config, "--store", "store")  # a store of this machine
        assert "relative path" not in output and "Release a/1 was not found in" in output


class AwsRecorder(HttpServer):
    """Answers every GET with status 404. `authorizations`: the header Authorization of each."""

    def __init__(self) -> None:
        self.authorizations: list[str] = []
        authorizations = self.authorizations

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                authorizations.append(self.headers["Authorization"])
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

        super().__init__(Handler)
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def aws_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsRecorder]:
    """A machine with credentials whose S3 endpoint and region are configured. Amazon S3 cannot be reached from it."""
    with AwsRecorder() as recorder:
        for name in [name for name in os.environ if name.startswith("AWS_") or name.lower() == "no_proxy"]:
            monkeypatch.delenv(name)
        for name, value in (
            *(("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key"), ("NO_PROXY", "127.0.0.1")),
            *(("AWS_CONFIG_FILE", str(tmp_path / "aws")), ("HTTPS_PROXY", "http://127.0.0.1:9")),
        ):
            monkeypatch.setenv(name, value)
        yield recorder


BUCKET: Changes = {"store": "s3://somewhere/models", "release": "a/1"}


def test_needs_secrets_for_every_spelling_of_s3(aws_machine: AwsRecorder, tmp_path: Path) -> None:
    for scheme in ("s3", "S3"):
        changes = {"store": f"{scheme}://somewhere/models", "endpoint": aws_machine.url, "release": "a/1"}
        _, output = check(edited(tmp_path, **changes, secrets={}))
        assert "does not declare aws_access_key_id and aws_secret_access_key under secrets" in output


def test_makes_no_cache_folder_of_a_replica(
    aws_machine: AwsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its home folder may be unknown here."""
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "own"))
    replica = str(tmp_path / "replica")
    variables = {"PREHEAT_CACHE_DIR": replica, "PREHEAT_CACHE_BYTES": "1"}
    in_config, in_variables = {"cache_dir": replica, "cache_bytes": 1}, {"environment_variables": variables}
    for changes in (in_config, in_variables, {"cache_dir": "~nobody-here/cache"}):
        _, output = check(edited(tmp_path, **BUCKET, endpoint=aws_machine.url, **changes))
        assert aws_machine.authorizations and "nobody-here" not in output
        assert (tmp_path / "own").is_dir() and not Path(replica).exists()


@pytest.mark.parametrize("source", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "file"])
def test_ignores_the_endpoint_of_this_machine(
    source: str, aws_machine: AwsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "file":
        (tmp_path / "aws").write_text(f"[default]\nendpoint_url = {aws_machine.url}\n")
    else:
        monkeypatch.setenv(source, aws_machine.url)
    code, output = check(edited(tmp_path, **BUCKET))
    assert code == 1 and "s3://somewhere/models at Amazon S3 cannot be reached" in output, output
    assert aws_machine.authorizations == []


def test_uses_the_region_of_a_replica(
    aws_machine: AwsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aws").write_text("[default]\nregion = ap-south-1\n")
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    for configured, used in ((None, "us-east-1"), ("eu-west-3", "eu-west-3")):
        aws_machine.authorizations.clear()
        check(edited(tmp_path, **BUCKET, endpoint=aws_machine.url, region=configured))
        assert aws_machine.authorizations
        assert all(f"/{used}/s3/" in authorization for authorization in aws_machine.authorizations)


def test_refuses_the_placeholder_of_a_shipped_config() -> None:
    for config in GPU_CONFIGS:
        code, output = check(config)
        assert code == 1 and "The store s3://preheat-releases is a placeholder. Name your own" in output, config


CPU: Changes = {"resources": {"use_gpu": False}}
UNREACHABLE: Changes = {"store": "s3://somewhere/models", "endpoint": "http://127.0.0.1:9"}
REFUSALS: dict[str, tuple[Changes, str]] = {
    "no store": ({"store": ""}, r"No store is configured\. Set model_metadata\.preheat\.store"),
    "no release": ({"release": ""}, r"No release is configured"),
    "unpublished": ({"release": "tiny-sdxl/never"}, r"Release tiny-sdxl/never was not found in file://.*tiny-sdxl/"),
    "odd name": ({"release": "../x"}, r"not the name of a release|is not a release"),
    "odd store": ({"store": "http://example.com"}, r"is not the URL of a store"),
    "unknown setting": ({"publik_key": "x"}, r"model_metadata\.preheat\.publik_key"),
    "invalid key": ({"public_key": "ed25519:x"}, r"is not a public key"),
    "untrusted": ({"public_key": str(public_key(Ed25519PrivateKey.generate()))}, r"is not signed"),
    "other torch": (
        {"requirements": ["torch==2.13.0+cu130"]},
        r"pins torch==2\.13\.0\+cu130, which runs engines of torch2\.13-cu130\. .*-torch2\.11-cu130\. Pin the torch",
    ),
    "other CUDA": ({"requirements": ["torch==2.11.0+cu128"]}, r"engines of torch2\.11-cu128\. Release .*cu130"),
    "torch not pinned": ({"requirements": ["torch>=2"]}, r"do not pin torch"),
    "size not built": (
        {"buckets": [{"height": 512, "width": 512, "rows": 2}]},
        r"has no \w+ engine for 512x512 with a batch of at most 2 on cuda-h100.*preheat build --size 512x512@2",
    ),
    "other GPU": (
        on("L4"), r"requests the GPU L4\. Release .* has engines for cuda-h100-sm90-torch2\.11-cu130\. Build on that"
    ),
    "GPU slice": (on("H100_40GB"), r"requests the GPU H100_40GB\. Release .* has engines for cuda-h100-"),
    "CPU": (CPU, r"requests a CPU\. Release .* has engines for cuda-h100-"),
    "TensorRT not pinned": ({"runtime": "tensorrt"}, r"chooses the runtime tensorrt for H100 and pins no TensorRT\."),
    "TensorRT without plans": (
        {"runtime": "tensorrt", "requirements": [*H100, TRT]},
        r"pins tensorrt-cu13==11\.4\.0\.106\. Release .* has engines for cuda-h100-sm90-torch2\.11-cu130\. Pin the",
    ),
    "TensorRT not supported": (plans(pin="tensorrt-cu13==10.3.0"), r"TensorRT 10\.3\.0 is not supported\. Install 10"),
    "TensorRT for an unknown GPU": (
        {"runtime": "tensorrt", **on("V100")},
        r"tensorrt for V100, whose compute capability is not known\. .* Set runtime to aot_inductor, or choose another",
    ),
    "TensorRT for a CPU": (
        {"runtime": "tensorrt", **CPU}, r"tensorrt for a CPU\. .* Set runtime to aot_inductor, or choose another"
    ),
    "another build of TensorRT": (
        plans(pin="tensorrt-cu13==11.4.0.999"), r"has plans of TensorRT 11\.4\.0\.106, and"
    ),
    "TensorRT-RTX for a GPU it does not support": (
        rtx("H100"),
        r"TensorRT-RTX does not support the GPU h100 \(compute capability 9\.0\); it supports 7\.5, 8\.0, 8\.6, 8\.9, "
        r"12\.0, 12\.1\. Choose a GPU with one of these, or the runtime aot_inductor or tensorrt\.",
    ),
    "TensorRT-RTX for another capability": (
        rtx("T4"),
        r"tensorrt-rtx for T4 and pins tensorrt-rtx-cu13-bindings==1\.7\.1\.116\. Release .* for cuda-sm80-rtx1\.7, ",
    ),
    "TensorRT-RTX not pinned": (
        rtx("A10G", None),
        r"chooses the runtime tensorrt-rtx for A10G and pins no TensorRT-RTX\. .* Pin the TensorRT-RTX of the release",
    ),
    "another build of TensorRT-RTX": (
        rtx("A10G", "tensorrt-rtx-cu13-bindings==1.7.0.1"),
        r"has plans of TensorRT-RTX 1\.7\.1\.116, and this machine has 1\.7\.0\.1",
    ),
    "TensorRT-RTX not supported": (
        rtx("A10G", "tensorrt-rtx-cu13-bindings==1.6.0.1"), r"TensorRT-RTX 1\.6\.0\.1 is not supported\. Install 1\.7"
    ),
    "TensorRT-RTX alone": (
        rtx("A10G", runtime="aot_inductor"),
        r"requests the GPU A10G\. Release .* has engines for cuda-sm80-rtx1\.7, cuda-sm86-rtx1\.7, cuda-sm89-rtx1\.7\.",
    ),
    "too few GPUs": (
        {"gpus_per_image": 2},
        r"gpus_per_image is 2, and the config requests 1 H100\. Set resources\.accelerator to H100:2",
    ),
    "too few GPUs for workers": (
        {"gpus_per_image": 2, "workers": 2, **on("H100:2")},
        r"2 workers with 2 GPUs for each image need 4 GPUs, and the config requests 2 H100\. Set .* to H100:4",
    ),
    "no engines for bands": (
        {"gpus_per_image": 2, "bands_per_image": 2, **on("H100:2")},
        r"has no unet engine in fp32 for 2 bands on .* --bands 2",
    ),
    "unknown runtime": ({"runtime": "onnx"}, r"model_metadata\.preheat\.runtime"),
    "unpublished, in a variable": (
        {"environment_variables": {"PREHEAT_RELEASE": "tiny-sdxl/never"}}, r"Release tiny-sdxl/never was not found"
    ),
    "missing folder": ({"store": "file:///nowhere/at/all"}, r"file:///nowhere/at/all is not a folder of this machine"),
    "unreachable": (UNREACHABLE, r"s3://somewhere/models"),
    "missing secrets": (
        UNREACHABLE | {"secrets": {}}, r"does not declare aws_access_key_id and aws_secret_access_key under secrets"
    ),
    "secret in the file": ({"secrets": {"aws_access_key_id": "AKIA"}}, r"holds a value for the secret aws_access"),
}  # fmt: skip


def test_refuses_mistakes_with_their_fixes(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    for name, (changes, message) in REFUSALS.items():
        code, output = check(edited(tmp_path, **{"store": gpu_store.url, "release": release, **changes}))
        assert code == 1 and re.search(f"refused .*(?:{message})", output), (name, output)


def test_reports_every_mistake_at_once(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    config = edited(tmp_path, store="", release=release, requirements=["torch"], secrets={"token": "x"})
    code, output = check(config)
    assert code == 1 and output.count("refused") == 3
    code, output = check(config, "--store", gpu_store.url)
    assert code == 1 and output.count("refused") == 2


def test_refuses_invalid_files(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    code, output = check(path)
    assert code == 1 and f"refused {path} does not exist." in output
    for content in (
        *(b"", b"a: [", b"\xff\xfe", b"model_name: x\nunknown_key: 1\n", b"[" * 5000, b"requirements: 7\n"),
        *(b"model_name: x\nmodel_metadata: &a {b: *a}\n", b"model_name: x\nmodel_name: y\n", b"? [x]\n"),
    ):
        path.write_bytes(content)
        code, output = check(path)
        message = "refused .*config.yaml (is not a valid|has an entry that is unknown to truss)"
        assert code == 1 and re.search(message, output), content[:40]
    path.write_text("model_name: x\nmodel_metadata:\n  a: &a {k: 1}\n  b: &b {<<: *a, k: 2}\n  c: {<<: *b}\n")
    assert "is not a valid" not in check(path)[1]
    for make in (Path.mkdir, os.mkfifo):
        path = tmp_path / make.__name__
        make(path)
        code, output = check(path)
        assert code == 1 and f"refused {path} cannot be read: " in output


def test_checks_the_adapters(store: WritableStore, release: str, tmp_path: Path) -> None:
    """They must be in the store, fit the release and have a trusted signature."""
    own = open_writable_store(copy_store(store, tmp_path / "store"))
    deltas = random_deltas(module_shapes(REPOSITORY / "data" / "tiny-sdxl"), LINEARS, 2, seed=0)
    add_adapter(own, "style", write_adapter(tmp_path / "style.safetensors", deltas, "kohya"))
    put_adapter(own, "other", 1.0)
    settings = {"store": own.url, "release": release}
    code, output = check(edited(tmp_path, CPU_DEMO, **settings, loras=["style"]))
    assert code == 0 and "adapters style" in output, output
    code, output = check(edited(tmp_path, CPU_DEMO, **settings, loras=["s*", "?ther"]))
    assert code == 0 and "Requests for adapter other would be refused. Adapter other does not fit" in output, output
    assert "adapter style" not in output
    changes: Changes
    for changes, message in (
        ({"loras": ["missing"]}, "Adapter missing was not found in .* Available: other, style. .*add-lora"),
        ({"loras": ["other"]}, "Adapter other does not fit release .* Remove it from `loras`"),
        ({"loras": ["style"], "public_key": str(public_key(KEY))}, "Adapter style is not signed.*add-lora --sign"),
        ({"loras": ["../x"]}, "loras"),
    ):
        code, output = check(edited(tmp_path, CPU_DEMO, **settings, **changes))
        assert code == 1 and re.search(message, output), output
