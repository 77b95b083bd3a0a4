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
from engine_builder.commands.main import app
from engine_builder.releases.mirror import copy_release
from engine_builder.releases.runnable_targets import parse_target
from engine_builder.releases.signing import public_key, sign
from engine_builder.stores.store import WritableStore, open_writable_store
from model.loading.target import Target
from model.store.manifest import EngineRecord, Manifest, Span, TensorRTPlan
from tests.conftest import Opener
from tests.support import object_store as ceph
from tests.support.adapter_model import put_adapter
from tests.support.adapters import LINEARS, copy_store, module_shapes, random_deltas, write_adapter
from tests.support.http_server import HttpServer, QuietHandler
from tests.support.object_store import ObjectStore
from tests.support.repository import REPOSITORY

CPU_DEMO = REPOSITORY / "truss" / "configs" / "cpu-demo.yaml"
KEY = Ed25519PrivateKey.generate()
GPU_CONFIGS = [REPOSITORY / "config.yaml", *sorted((REPOSITORY / "truss" / "configs").glob("[!c]*.yaml"))]


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


def edited(source: Path, folder: Path, **changes: object) -> Path:
    """Copy a config with changed entries of model_metadata.preheat, or of the config itself (those named below)."""
    config = yaml.safe_load(source.read_text())
    for name in ("requirements", "secrets", "resources", "environment_variables"):
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


H100 = ["torch==2.11.0+cu130"]
RTX = [*H100, "tensorrt-rtx-cu13-libs==1.7.1.116", "tensorrt-rtx-cu13-bindings==1.7.1.116"]


def rtx_config(accelerator: str, **changes: object) -> dict[str, object]:
    """Return the changes of a config that serves tiny-sdxl/rtx on a GPU."""
    resources = {"accelerator": accelerator, "use_gpu": True}
    entries = {"release": "tiny-sdxl/rtx", "runtime": "tensorrt-rtx", "requirements": RTX, "resources": resources}
    return entries | changes


ACCEPTED: dict[str, tuple[dict[str, object], list[str]]] = {
    "as shipped": (
        {},
        ["target cuda-h100-sm90-torch2.11-cu130", "sizes 1024x1024@16 ", "warning The config has no public_key"],
    ),
    "smaller batch": ({"buckets": [{"height": 1024, "width": 1024, "rows": 4}]}, ["sizes 1024x1024@4 "]),
    "signed": (
        {"release": "tiny-sdxl/signed", "public_key": str(public_key(KEY))},
        [f"release tiny-sdxl/signed, signed by {public_key(KEY).key_id}"],
    ),
    "torch without its build": (
        {"requirements": ["torch==2.11.0"]},
        ["warning The pin torch==2.11.0 does not name a CUDA build"],
    ),
    "TensorRT": (
        {"release": "tiny-sdxl/plans", "runtime": "tensorrt", "requirements": [*H100, "tensorrt-cu13==11.4.0.106"]},
        ["target cuda-sm90-trt11.4"],
    ),
    "fastest runtime": ({"runtime": "fastest"}, ["target cuda-h100-sm90-torch2.11-cu130"]),
    "fastest runtime, TensorRT not supported": (
        {"runtime": "fastest", "requirements": [*H100, "tensorrt-cu13==10.3.0"]},
        ["target cuda-h100-sm90-torch2.11-cu130"],
    ),
    "fastest runtime, only plans": (
        {"release": "tiny-sdxl/plans", "runtime": "fastest", "requirements": [*H100, "tensorrt-cu13==11.4.0.106"]},
        ["target cuda-sm90-trt11.4"],
    ),
    "TensorRT-RTX for an A10G": (rtx_config("A10G"), ["target cuda-sm86-rtx1.7", "sizes 1024x1024@16 "]),
    "TensorRT-RTX for an A100": (rtx_config("A100"), ["target cuda-sm80-rtx1.7"]),
    "TensorRT-RTX for an A100 of 40 GB": (rtx_config("A100_40GB"), ["target cuda-sm80-rtx1.7"]),
    "TensorRT-RTX for an L40S": (rtx_config("L40S"), ["target cuda-sm89-rtx1.7"]),
    "fastest runtime, only plans of TensorRT-RTX": (rtx_config("L4", runtime="fastest"), ["target cuda-sm89-rtx1.7"]),
    "two GPUs for each image": (
        {"gpus_per_image": 2, "resources": {"accelerator": "H100:2", "use_gpu": True}},
        ["target cuda-h100-sm90-torch2.11-cu130"],
    ),
    "environment variable": (
        {"release": "tiny-sdxl/never", "environment_variables": {"PREHEAT_RELEASE": "tiny-sdxl/signed"}},
        ["release tiny-sdxl/signed"],
    ),
}


@pytest.mark.parametrize("changes, lines", ACCEPTED.values(), ids=ACCEPTED)
def test_accepts_a_gpu_release(
    changes: dict[str, object], lines: list[str], gpu_store: WritableStore, release: str, tmp_path: Path
) -> None:
    base: dict[str, object] = {"store": gpu_store.url, "release": release}
    code, output = check(edited(REPOSITORY / "config.yaml", tmp_path, **(base | changes)))
    assert code == 0 and "refused" not in output, output
    assert all(line in output for line in lines), output
    assert ("no public_key" in output) == ("public_key" not in changes)


@pytest.mark.parametrize(
    "target",
    [
        Target("cuda", "h100", "sm90", "torch2.11-cu130"),
        Target("cuda", "", "sm90", "trt11.4"),
        Target("cuda", "ampere_plus", "", "trt11.4"),
        Target("cuda", "", "sm86", "rtx1.7"),
        Target("cpu", "x86_64_v3", "", "torch2.13"),
    ],
    ids=lambda target: target.key,
)
def test_parses_the_key_of_every_kind_of_target(target: Target) -> None:
    assert parse_target(target.key) == target


def test_reads_a_release_from_a_bucket(
    gpu_store: WritableStore,
    release: str,
    object_store: ObjectStore,
    open_bucket: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = open_bucket()
    config = edited(
        REPOSITORY / "config.yaml",
        tmp_path,
        store=bucket.url,
        release=release,
        endpoint=object_store.url,
        region="us-east-1",
    )
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
    code, output = check(edited(REPOSITORY / "config.yaml", tmp_path, store="", release=""))
    assert code == 1 and "No store is configured. Set model_metadata.preheat.store in the config, or check" in output
    assert "with --store. A replica does not have this machine's variables." in output
    assert "PREHEAT_STORE" not in output, "a fix that does not help"


@pytest.mark.parametrize("scheme", ["s3", "S3"])
def test_needs_secrets_for_every_spelling_of_s3(scheme: str, aws_machine: "AwsRecorder", tmp_path: Path) -> None:
    changes = {"store": f"{scheme}://somewhere/models", "endpoint": aws_machine.url, "release": "a/1"}
    _, output = check(edited(REPOSITORY / "config.yaml", tmp_path, **changes, secrets={}))
    assert "does not declare aws_access_key_id and aws_secret_access_key under secrets" in output


@pytest.mark.parametrize("path", ["store", "./store", "~/store"])
@pytest.mark.parametrize("where", ["config", "variable"])
def test_refuses_a_relative_store(path: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {} if where == "config" else {"PREHEAT_STORE": path}
    config = edited(
        REPOSITORY / "config.yaml",
        tmp_path,
        store=path if where == "config" else "",
        release="a/1",
        environment_variables=variables,
    )
    code, output = check(config)
    assert code == 1 and f"The store {path} is a relative path" in output and "Name s3://bucket/prefix, or" in output
    _, output = check(config, "--store", "store")  # a store of this machine
    assert "relative path" not in output and "Release a/1 was not found in" in output


@pytest.mark.parametrize("where", ["config", "variable"])
def test_makes_no_cache_folder_of_a_replica(
    where: str, aws_machine: "AwsRecorder", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "own"))
    replica = str(tmp_path / "replica")
    changes: dict[str, object] = {"store": "s3://somewhere/models", "endpoint": aws_machine.url, "release": "a/1"}
    if where == "config":
        changes |= {"cache_dir": replica, "cache_bytes": 1}
    else:
        changes["environment_variables"] = {"PREHEAT_CACHE_DIR": replica, "PREHEAT_CACHE_BYTES": "1"}
    check(edited(REPOSITORY / "config.yaml", tmp_path, **changes))
    assert aws_machine.authorizations and (tmp_path / "own").is_dir() and not Path(replica).exists()


def test_home_folder_of_a_replica_may_be_unknown_here(aws_machine: "AwsRecorder", tmp_path: Path) -> None:
    store = {"store": "s3://somewhere/models", "endpoint": aws_machine.url, "release": "a/1"}
    _, output = check(edited(REPOSITORY / "config.yaml", tmp_path, **store, cache_dir="~nobody-here/cache"))
    assert aws_machine.authorizations and "nobody-here" not in output


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
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        yield recorder


@pytest.mark.parametrize("source", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "file"])
def test_ignores_the_endpoint_of_this_machine(
    source: str, aws_machine: AwsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "file":
        (tmp_path / "aws").write_text(f"[default]\nendpoint_url = {aws_machine.url}\n")
    else:
        monkeypatch.setenv(source, aws_machine.url)
    code, output = check(
        edited(REPOSITORY / "config.yaml", tmp_path, store="s3://somewhere/models", release="tiny-sdxl/1")
    )
    assert code == 1 and "s3://somewhere/models at Amazon S3 cannot be reached" in output, output
    assert aws_machine.authorizations == []


@pytest.mark.parametrize(("configured", "used"), [(None, "us-east-1"), ("eu-west-3", "eu-west-3")])
def test_uses_the_region_of_a_replica(
    configured: str | None, used: str, aws_machine: AwsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aws").write_text("[default]\nregion = ap-south-1\n")
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    changes = {"endpoint": aws_machine.url, "region": configured, "release": "tiny-sdxl/1"}
    check(edited(REPOSITORY / "config.yaml", tmp_path, store="s3://somewhere/models", **changes))
    assert aws_machine.authorizations
    assert all(f"/{used}/s3/" in authorization for authorization in aws_machine.authorizations)


@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda path: path.stem)
def test_refuses_the_placeholder_of_a_shipped_config(config: Path) -> None:
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
        r"pins torch==2\.13\.0\+cu130, which runs engines of torch2\.13-cu130\. .*-torch2\.11-cu130\. Pin the torch",
    ),
    "other CUDA": ({"requirements": ["torch==2.11.0+cu128"]}, r"engines of torch2\.11-cu128\. Release .*cu130"),
    "torch for a CPU": ({"requirements": ["torch==2.11.0+cpu"]}, r"engines of torch2\.11-cpu\. Release .*cu130"),
    "torch not pinned": ({"requirements": ["torch>=2"]}, r"do not pin torch"),
    "size not built": (
        {"buckets": [{"height": 512, "width": 512, "rows": 2}]},
        r"has no \w+ engine for 512x512 with a batch of at most 2 on cuda-h100.*preheat build --size 512x512@2",
    ),
    "other GPU": (
        {"resources": {"accelerator": "L4", "use_gpu": True}},
        r"requests the GPU L4\. Release .* has engines for cuda-h100-sm90-torch2\.11-cu130\. Build on that device",
    ),
    "GPU slice": (
        {"resources": {"accelerator": "H100_40GB", "use_gpu": True}},
        r"requests the GPU H100_40GB\. Release .* has engines for cuda-h100-",
    ),
    "CPU": ({"resources": {"use_gpu": False}}, r"requests a CPU\. Release .* has engines for cuda-h100-"),
    "TensorRT not pinned": ({"runtime": "tensorrt"}, r"chooses the runtime tensorrt for H100 and pins no TensorRT\."),
    "TensorRT without plans": (
        {"runtime": "tensorrt", "requirements": [*H100, "tensorrt-cu13==11.4.0.106"]},
        r"pins tensorrt-cu13==11\.4\.0\.106\. Release .* has engines for cuda-h100-sm90-torch2\.11-cu130\. Pin the",
    ),
    "TensorRT not supported": (
        {"runtime": "tensorrt", "requirements": [*H100, "tensorrt-cu13==10.3.0"]},
        r"TensorRT 10\.3\.0 is not supported\. Install 10\.16",
    ),
    "TensorRT for an unknown GPU": (
        {"runtime": "tensorrt", "resources": {"accelerator": "V100", "use_gpu": True}},
        r"tensorrt for V100, whose compute capability is not known\. .* Set runtime to aot_inductor, or choose another",
    ),
    "TensorRT for a CPU": (
        {"runtime": "tensorrt", "resources": {"use_gpu": False}},
        r"tensorrt for a CPU\. .* Set runtime to aot_inductor, or choose another",
    ),
    "another build of TensorRT": (
        {"release": "tiny-sdxl/plans", "runtime": "tensorrt", "requirements": [*H100, "tensorrt-cu13==11.4.0.999"]},
        r"has plans of TensorRT 11\.4\.0\.106, and",
    ),
    "TensorRT-RTX for a GPU it does not support": (
        rtx_config("H100"),
        r"TensorRT-RTX does not support the GPU h100 \(compute capability 9\.0\); it supports 7\.5, 8\.0, 8\.6, 8\.9, "
        r"12\.0, 12\.1\. Choose a GPU with one of these, or the runtime aot_inductor or tensorrt\.",
    ),
    "TensorRT-RTX for another capability": (
        rtx_config("T4"),
        r"tensorrt-rtx for T4 and pins tensorrt-rtx-cu13-bindings==1\.7\.1\.116\. Release .* for cuda-sm80-rtx1\.7, ",
    ),
    "TensorRT-RTX for a CPU": (
        rtx_config("A10G", resources={"use_gpu": False}),
        r"tensorrt-rtx for a CPU\. .* Set runtime to aot_inductor, or choose another",
    ),
    "TensorRT-RTX not pinned": (
        rtx_config("A10G", requirements=H100),
        r"chooses the runtime tensorrt-rtx for A10G and pins no TensorRT-RTX\. .* Pin the TensorRT-RTX of the release",
    ),
    "another build of TensorRT-RTX": (
        rtx_config("A10G", requirements=[*H100, "tensorrt-rtx-cu13-bindings==1.7.0.1"]),
        r"has plans of TensorRT-RTX 1\.7\.1\.116, and this machine has 1\.7\.0\.1",
    ),
    "TensorRT-RTX not supported": (
        rtx_config("A10G", requirements=[*H100, "tensorrt-rtx-cu13-bindings==1.6.0.1"]),
        r"TensorRT-RTX 1\.6\.0\.1 is not supported\. Install 1\.7",
    ),
    "TensorRT-RTX alone": (
        rtx_config("A10G", runtime="aot_inductor"),
        r"requests the GPU A10G\. Release .* has engines for cuda-sm80-rtx1\.7, cuda-sm86-rtx1\.7, cuda-sm89-rtx1\.7\.",
    ),
    "TensorRT alone": ({"release": "tiny-sdxl/plans"}, r"requests the GPU H100\. Release .* for cuda-sm90-trt11\.4"),
    "too few GPUs": (
        {"gpus_per_image": 2},
        r"gpus_per_image is 2, and the config requests 1 H100\. Set resources\.accelerator to H100:2",
    ),
    "too few GPUs for workers": (
        {"gpus_per_image": 2, "workers": 2, "resources": {"accelerator": "H100:2", "use_gpu": True}},
        r"2 workers with 2 GPUs for each image need 4 GPUs, and the config requests 2 H100\. Set .* to H100:4",
    ),
    "no engines for bands": (
        {"gpus_per_image": 2, "bands_per_image": 2, "resources": {"accelerator": "H100:2", "use_gpu": True}},
        r"has no unet engine in fp32 for 2 bands on .* --bands 2",
    ),
    "unknown runtime": ({"runtime": "onnx"}, r"model_metadata\.preheat\.runtime"),
    "unpublished, in a variable": (
        {"environment_variables": {"PREHEAT_RELEASE": "tiny-sdxl/never"}},
        r"Release tiny-sdxl/never was not found",
    ),
    "missing folder": ({"store": "file:///nowhere/at/all"}, r"was not found in file:///nowhere/at/all"),
    "unreachable": ({"store": "s3://somewhere/models", "endpoint": "http://127.0.0.1:9"}, r"s3://somewhere/models"),
    "missing secrets": (
        {"store": "s3://somewhere/models", "endpoint": "http://127.0.0.1:9", "secrets": {}},
        r"does not declare aws_access_key_id and aws_secret_access_key under secrets",
    ),
    "secret in the file": ({"secrets": {"aws_access_key_id": "AKIA"}}, r"holds a value for the secret aws_access"),
}


@pytest.mark.parametrize("changes, message", REFUSALS.values(), ids=REFUSALS)
def test_refuses_a_mistake_with_its_fix(
    changes: dict[str, object], message: str, gpu_store: WritableStore, release: str, tmp_path: Path
) -> None:
    base: dict[str, object] = {"store": gpu_store.url, "release": release}
    code, output = check(edited(REPOSITORY / "config.yaml", tmp_path, **(base | changes)))
    assert code == 1 and re.search(f"refused .*(?:{message})", output), output


def test_reports_every_mistake_at_once(gpu_store: WritableStore, release: str, tmp_path: Path) -> None:
    config = edited(
        REPOSITORY / "config.yaml", tmp_path, store="", release=release, requirements=["torch"], secrets={"token": "x"}
    )
    code, output = check(config)
    assert code == 1 and output.count("refused") == 3
    code, output = check(config, "--store", gpu_store.url)
    assert code == 1 and output.count("refused") == 2


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"a: [", b"\xff\xfe", b"model_name: x\nunknown_key: 1\n", b"[" * 5000, b"requirements: 7\n"),
        b"model_name: x\nmodel_metadata: &a {b: *a}\n",
    ],
    ids=["empty", "half", "not text", "unknown key", "nested", "odd value", "contains itself"],
)
def test_refuses_an_invalid_truss_config(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    code, output = check(tmp_path / "config.yaml")
    assert code == 1 and re.search(
        "refused .*config.yaml (is not a valid|has an entry that is unknown to truss)", output
    )


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_refuses_a_path_that_is_not_a_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    code, output = check(path)
    reason = {"missing": "does not exist.", "folder": "cannot be read: ", "pipe": "cannot be read: "}[kind]
    assert code == 1 and f"refused {path} {reason}" in output


def test_checks_the_adapters(store: WritableStore, release: str, tmp_path: Path) -> None:
    """They must be in the store, fit the release and have a trusted signature."""
    own = open_writable_store(copy_store(store, tmp_path / "store"))
    deltas = random_deltas(module_shapes(REPOSITORY / "data" / "tiny-sdxl"), LINEARS, 2, seed=0)
    add_adapter(own, "style", write_adapter(tmp_path / "style.safetensors", deltas, "kohya"))
    put_adapter(own, "other", 1.0)
    settings = {"store": own.url, "release": release}

    def check_adapters(**changes: object) -> tuple[int, str]:
        config = yaml.safe_load(CPU_DEMO.read_text())
        config["model_metadata"]["preheat"] |= settings | changes
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        return check(tmp_path / "config.yaml")

    code, output = check_adapters(loras=["style"])
    assert code == 0 and "adapters style" in output, output
    for changes, message in (
        ({"loras": ["missing"]}, "Adapter missing was not found in .* Available: other, style. .*add-lora"),
        ({"loras": ["other"]}, "Adapter other does not fit release .* Remove it from `loras`"),
        ({"loras": ["style"], "public_key": str(public_key(KEY))}, "Adapter style is not signed.*add-lora --sign"),
        ({"loras": ["../x"]}, "loras"),
    ):
        code, output = check_adapters(**changes)
        assert code == 1 and re.search(message, output), output
