"""The deployment's settings: every value is checked, and unknown names are refused."""

from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.deployment import Deployment, ServedPrecision
from model.errors import ConfigError
from model.model import Model
from model.settings import STORE_SETTINGS, Limits, ServedBucket, Settings, read_settings
from model.store.manifest import Fp16Steps
from model.store.precision import FP8
from tests.support.repository import REPOSITORY


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE", "RELEASE", "RELEASES", "RUNTIME", "PUBLIC_KEY", "CACHE_DIR", "CACHE_BYTES"):
        monkeypatch.delenv(f"PREHEAT_{name}", raising=False)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def test_reads_every_config_of_this_repository() -> None:
    for path in [REPOSITORY / "config.yaml", *sorted((REPOSITORY / "truss" / "configs").glob("*.yaml"))]:
        section = yaml.safe_load(path.read_text())["model_metadata"]["preheat"]
        settings = read_settings(section)
        assert (settings.store, settings.release) == (section["store"], section["release"])
        assert [bucket.model_dump(exclude_defaults=True) for bucket in settings.buckets] == section.get("buckets", [])


def test_empty_values_count_as_missing() -> None:
    assert read_settings(None) == read_settings({}) == read_settings({"public_key": None, "store": ""}) == Settings()


def test_reads_each_kind_of_value() -> None:
    keys = [str(signing.public_key(Ed25519PrivateKey.generate())) for _ in range(2)]
    settings = read_settings(
        {
            "release": "a/1",
            "runtime": "fastest",
            "public_key": keys,
            "cache_bytes": "20GiB",
            "buckets": [{"height": 64, "width": 128, "rows": 2}],
            "limits": {"max_queue": 16, "deadline_seconds": float("inf")},
            "log_prompts": True,
            "precision": "fp8",
            "fp16_steps": {"first": 2, "last": 1},
            "compare_every": 100,
            "gpus_per_image": 2,
        }
    )
    assert settings.gpus_per_image == 2 and read_settings({}).gpus_per_image == 1
    assert Deployment.of(settings).precision == ServedPrecision(FP8, Fp16Steps(first=2, last=1), compares=True)
    assert Deployment.of(read_settings({"release": "a/1"})).precision == ServedPrecision()
    assert settings.runtime == "fastest" and settings.log_prompts and settings.cache_bytes == 20 * 2**30
    assert settings.buckets == [ServedBucket(height=64, width=128, rows=2)]
    assert settings.limits == Limits(max_queue=16, deadline_seconds=float("inf"))
    assert [str(key) for key in settings.public_key] == keys
    assert read_settings({"public_key": ", ".join(keys)}).public_key == settings.public_key
    assert read_settings({"cache_bytes": 1000}).cache_bytes == 1000


def test_workers_use_all_gpus() -> None:
    # gpus_per_image, workers (0: not set), GPUs of the machine -> the workers that run
    for per_image, given, gpus, workers in (
        *((1, 0, 0, 1), (1, 0, 1, 1), (1, 0, 2, 2), (2, 0, 2, 1), (2, 0, 1, 1), (2, 0, 4, 2)),
        *((1, 1, 2, 1), (1, 2, 0, 2), (2, 2, 4, 2)),
    ):
        settings = read_settings({"gpus_per_image": per_image} | ({"workers": given} if given else {}))
        assert settings.worker_count(gpus) == workers, (per_image, given, gpus)
        assert settings.has_one_worker(gpus) == (workers == 1)
    with pytest.raises(ConfigError, match="2 workers with 2 GPUs for each image need 4 GPUs, and this machine has 3"):
        read_settings({"workers": 2, "gpus_per_image": 2}).worker_count(3)


def test_environment_overrides_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"store": "s3://config", "runtime": "tensorrt", "region": "config", "cache_bytes": 5}
    monkeypatch.setenv("PREHEAT_STORE", "s3://environment")
    monkeypatch.setenv("PREHEAT_RUNTIME", "fastest")
    monkeypatch.setenv("PREHEAT_CACHE_BYTES", "7")
    monkeypatch.setenv("PREHEAT_PRECISION", "fp16")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "second")
    settings = read_settings(section)
    assert (settings.store, settings.runtime, settings.cache_bytes) == ("s3://environment", "fastest", 7)
    assert settings.region == "second" and settings.precision == "fp16"
    monkeypatch.setenv("AWS_REGION", "first")
    assert read_settings(section).region == "first"
    monkeypatch.setenv("PREHEAT_RUNTIME", "trt")
    with pytest.raises(ConfigError, match='PREHEAT_RUNTIME: got "trt".*Fix the variable PREHEAT_RUNTIME'):
        read_settings(section)


def test_a_release_of_the_environment_replaces_several_and_the_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"releases": ["a/1", "b/*"]}
    assert read_settings(several).release_patterns() == ("a/1", "b/*")
    monkeypatch.setenv("PREHEAT_RELEASE", "c/1")
    assert read_settings(several).release_patterns() == ("c/1",)
    monkeypatch.setenv("PREHEAT_RELEASES", "a/1, b/2")
    with pytest.raises(ConfigError, match="PREHEAT_RELEASES: a/1, b/2, and release is c/1: set one of the two"):
        read_settings({})
    monkeypatch.delenv("PREHEAT_RELEASE")
    assert read_settings({"release": "c/1"}).release_patterns() == ("a/1", "b/2")
    assert read_settings({}).of_release("d/1").release_patterns() == ("d/1",)
    monkeypatch.setenv("PREHEAT_RELEASES", " , ")
    assert read_settings({"release": "c/1"}).release_patterns() == ("c/1",)


REFUSED: list[tuple[Any, str]] = [
    ({"public_keys": "ed25519:x"}, "public_keys: is not a known field; the fields are store, .*public_key"),
    ({"public_keys": None}, "public_keys: is not a known field"),
    ({"public_key": "x"}, "public_key: 'x' is not a public key"),
    ({"buckets": ""}, 'buckets: got "", expected a list'),
    ({"\ud800": 1}, "model_metadata.preheat: the name of a field"),
    ("s3://bucket", 'model_metadata.preheat is "s3://bucket", expected settings by name'),
    ({"store": ["s3://bucket"]}, "store: got a list, expected a string"),
    ({"log_prompts": "no"}, 'log_prompts: got "no", expected true or false'),
    ({1: 2}, "1: the name of a field is not text"),
    (
        {"runtime": "TensorRT"},
        'runtime: got "TensorRT", expected one of "aot_inductor", "tensorrt", "tensorrt-rtx", "fastest"',
    ),
    ({"precision": "int4"}, 'precision: got "int4", expected one of "fp16", "bf16", "fp32", "fp8", "int8"'),
    ({"compare_every": 0}, "compare_every: got 0"),
    ({"gpus_per_image": 9}, "gpus_per_image: got 9"),
    ({"workers": 0}, "workers: got 0"),
    ({"bands_per_image": 0}, "bands_per_image: got 0"),
    ({"bands_per_image": 2, "gpus_per_image": 2, "runtime": "fastest"}, "bands_per_image: .*plans have no bands"),
    ({"bands_per_image": 3}, "bands_per_image: .*possible are 1, 2, 4, 8"),
    ({"bands_per_image": 2}, "bands_per_image: .*gpus_per_image is 1, which is no multiple"),
    (
        {"bands_per_image": 2, "gpus_per_image": 2, "compare_every": 9},
        "bands_per_image: .*compared on one GPU only",
    ),
    ({"release": "a/1", "releases": ["b/1"]}, "releases: b/1, and release is a/1: set one of the two"),
    ({"release": "a/*"}, r"release: a/\*, and only `releases` may stand for all versions of a model"),
    ({"releases": [1]}, "releases.0: got 1, expected a string"),
    ({"releases": ["a/1", "b/1"], "compare_every": 9}, "compare_every: 9, and several `releases`"),
    ({"releases": ["a/1", "b/1"], "gpus_per_image": 2}, "gpus_per_image: 2 GPUs .* several `releases`"),
    ({"gpus_per_image": 2, "loras": ["pixel"]}, "gpus_per_image: .* adapters need gpus_per_image 1"),
    ({"fp16_steps": 3}, "fp16_steps: got 3, expected a JSON object with the fields first, last"),
    ({"fp16_steps": {"first": -1}}, "fp16_steps.first: got -1"),
    ({"fp16_steps": {"start": 1}}, "fp16_steps.start: is not a known field; the fields are first, last"),
    ({"runtime": "x" * 1000}, "runtime: got .{60,90}1000 characters"),
    ({"cache_bytes": "20 bananas"}, "cache_bytes: .* a size like 20GiB"),
    ({"cache_bytes": True}, "cache_bytes: got true, expected a whole number of bytes"),
    ({"buckets": 3}, "buckets: got 3, expected a list"),
    (
        {"buckets": ["64x64"]},
        "buckets.0: got .64x64., expected a JSON object with the fields height, width, rows, warm_up",
    ),
    ({"buckets": [{"height": 64, "width": 64}]}, "buckets.0.rows: is required: an integer above 0"),
    ({"buckets": [{"height": 64, "width": 64, "rows": 0}]}, "buckets.0.rows: got 0, expected an integer above 0"),
    ({"buckets": [{"height": 64, "width": 64, "rows": 2, "depth": 1}]}, "buckets.0.depth: is not a known field"),
    ({"buckets": [{"height": 64, "width": 64, "rows": 2, "warm_up": False}]}, "buckets: no bucket with `warm_up`"),
    ({"limits": 3}, "limits: got 3, expected a JSON object with the fields max_queue"),
    ({"limits": {"queue": 8}}, "limits.queue: is not a known field; the fields are max_queue, deadline_seconds"),
    ({"limits": {"max_queue": 7}}, "limits.max_queue: got 7, expected an integer of at least 8"),
    ({"limits": {"max_queue": 9.5}}, "limits.max_queue: got 9.5, expected an integer of at least 8"),
    ({"limits": {"deadline_seconds": "300"}}, 'limits.deadline_seconds: got "300", expected a number above 0'),
    ({"limits": {"stuck_seconds": float("nan")}}, "limits.stuck_seconds: got NaN"),
]


def test_refuses_unknown_names_and_wrong_values(caplog: pytest.LogCaptureFixture) -> None:
    """A refused config is logged like a failed load."""
    for section, message in REFUSED:
        with pytest.raises(ConfigError, match=message) as caught:
            Model(config={"model_metadata": {"preheat": section}})
        assert "Fix it under model_metadata.preheat in config.yaml." in str(caught.value)
        assert len(str(caught.value)) < 500 and '"event": "load_failed"' in caplog.text


def test_commands_read_the_store_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_RUNTIME", "unknown")
    monkeypatch.setenv("PREHEAT_CACHE_BYTES", "7")
    assert read_settings(variables=STORE_SETTINGS).cache_bytes == 7


def test_names_a_required_setting_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="No store is configured. Set .* or PREHEAT_STORE"):
        Settings().required("store")


def test_safety_takes_yamls_off() -> None:
    """YAML reads the word off, without quotes, as false."""
    assert read_settings({"safety": False}, environment={}).safety == "off"
    assert read_settings({"safety": "blank"}, environment={}).safety == "blank"
    assert read_settings({"safety": "blank"}, environment={"PREHEAT_SAFETY": "flag"}).safety == "flag"
    for wrong in (True, "on", 0):
        with pytest.raises(ConfigError, match="safety: got .*, expected one of"):
            read_settings({"safety": wrong}, environment={})
