"""`preheat kubernetes`: valid manifests with the values of the config, and refusals of what cannot be deployed."""

import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from preheat.kubernetes import ANSWER_SECONDS, DRAIN_SECONDS, METRIC, PORT, READY_PATH
from preheat.main import app
from tests.support.metrics import declared_metrics
from tests.support.repository import REPOSITORY

CONFIGS = [REPOSITORY / "config.yaml", *sorted((REPOSITORY / "truss" / "configs").glob("*.yaml"))]
L4 = REPOSITORY / "truss" / "configs" / "l4.yaml"
IMAGE = "registry.example/preheat:1"
VERSIONS = ("1.25", "1.37")  # of Kubernetes: the oldest and the newest with schemas in kubernetes-validate
OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "none": ([], {"emptyDir": {}}),
    "node cache": (
        ["--cache", "node:/var/lib/preheat"],
        {"hostPath": {"path": "/var/lib/preheat", "type": "DirectoryOrCreate"}},
    ),
    "claim": (["--cache", "claim:blobs"], {"persistentVolumeClaim": {"claimName": "blobs"}}),
    "other names": (["--name", "images-2"], {"emptyDir": {}}),
}
"""Options, and the volume of the cache that they ask for."""


def run(*options: str, releases: tuple[str, ...] = ("sdxl/1",)) -> tuple[int, str]:
    defaults = ["--namespace", "images", "--image", IMAGE, "--store", "s3://models"]
    given = [option for option in options if option.startswith("--")]
    pairs = zip(defaults[::2], defaults[1::2], strict=True)
    missing = [word for name, value in pairs if name not in given for word in (name, value)]
    result = CliRunner().invoke(app, ["kubernetes", *releases, *missing, *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.output


def manifests(*options: str, **named: Any) -> dict[str, Any]:
    """Return the printed manifests by kind. Each must be valid, without unknown fields."""
    status, output = run(*options, **named)
    assert status == 0, output
    printed = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(output)}
    for kind, manifest in printed.items():
        for version in VERSIONS if kind != "ScaledObject" else ():  # a kind of KEDA
            kubernetes_validate.validate(manifest, version, strict=True)
    return printed


def pod_of(printed: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = printed["Deployment"]["spec"]["template"]["spec"]
    return pod


def environment_of(printed: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in pod_of(printed)["containers"][0]["env"]}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_valid_manifests(config: Path) -> None:
    printed = manifests("--config", str(config))
    assert [*printed] == ["Service", "Deployment", "PodDisruptionBudget", "HorizontalPodAutoscaler"]


@pytest.mark.parametrize(("options", "cache"), OPTIONS.values(), ids=OPTIONS)
def test_every_option_has_valid_manifests(options: list[str], cache: dict[str, Any]) -> None:
    printed = manifests(*options)
    labels = printed["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for manifest in printed.values():
        name = options[1] if "--name" in options else "preheat"
        assert (manifest["metadata"]["name"], manifest["metadata"]["namespace"]) == (name, "images")
    selectors = [printed[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    assert [*selectors, printed["Service"]["spec"]["selector"]] == [labels] * 3
    pod = pod_of(printed)
    assert {"name": "cache", **cache} in pod["volumes"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_pods_have_the_store_and_the_nodes_that_are_named() -> None:
    options = ["--store", "file:///srv/store", "--store-claim", "models", "--node-label", "nvidia.com/gpu.product=L4"]
    pod = pod_of(manifests(*options))
    claim = {"claimName": "models", "readOnly": True}
    assert {"name": "store", "persistentVolumeClaim": claim} in pod["volumes"]
    mount = {"name": "store", "mountPath": "/srv/store", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "L4"}
    assert "nodeSelector" not in pod_of(manifests())


def test_validation_finds_a_wrong_field() -> None:
    deployment = manifests()["Deployment"]
    pod_of({"Deployment": deployment})["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_manifests_have_the_values_of_the_config(tmp_path: Path) -> None:
    config = yaml.safe_load(L4.read_text())
    config["resources"] |= {"accelerator": "L4:2", "cpu": "6", "memory": "20Gi"}
    names = ("startup", "stop_traffic", "restart")
    thresholds = {f"{name}_threshold_seconds": seconds for name, seconds in zip(names, (601, 40, 100), strict=True)}
    config["runtime"]["health_checks"] = thresholds
    config["environment_variables"] = {"AWS_ENDPOINT_URL_S3": "https://s3.example"}
    config["secrets"] = {"aws_access_key_id": None}
    config["model_metadata"]["preheat"] |= {"grace_seconds": 90, "release": "other/1"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    printed = manifests("--config", str(path))
    pod = pod_of(printed)
    [container] = pod["containers"]
    assert container["image"] == IMAGE
    assert container["resources"] == {
        "requests": {"cpu": "6", "memory": "20Gi", "nvidia.com/gpu": 2},
        "limits": {"memory": "20Gi", "nvidia.com/gpu": 2},
    }
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    assert [probe["failureThreshold"] * probe["periodSeconds"] for probe in probes] == [605, 40, 100]
    assert pod["terminationGracePeriodSeconds"] == DRAIN_SECONDS + 90 + ANSWER_SECONDS
    assert environment_of(printed) == {
        "AWS_ENDPOINT_URL_S3": "https://s3.example", "PREHEAT_STORE": "s3://models", "PREHEAT_RELEASE": "sdxl/1",
        "PREHEAT_CACHE_DIR": "/cache", "PREHEAT_GRACE_SECONDS": "90", "HOME": "/tmp",
    }  # fmt: skip
    assert {"name": "secrets", "mountPath": "/secrets", "readOnly": True} in container["volumeMounts"]
    assert "--from-literal=aws_access_key_id=..." in run("--config", str(path))[1]


def test_config_names_what_the_options_do_not(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(L4.read_text().replace("s3://preheat-releases", "s3://of-the-config"))
    result = CliRunner().invoke(
        app, ["kubernetes", "a/1", "b/*", "--namespace=n", "--image=i", f"--config={path}"], catch_exceptions=False
    )
    environment = environment_of({"Deployment": [*yaml.safe_load_all(result.output)][1]})
    assert environment["PREHEAT_STORE"] == "s3://of-the-config" and environment["PREHEAT_RELEASES"] == "a/1,b/*"
    assert "PREHEAT_RELEASE" not in environment


def test_pods_have_no_rights() -> None:
    """The pod fits the Pod Security level `restricted`, except for a cache on the node."""
    pod = pod_of(manifests())
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 60000
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "initContainers" not in pod and all("hostPath" not in volume for volume in pod["volumes"])
    [owner] = pod_of(manifests("--cache", "node:/var/lib/preheat"))["initContainers"]
    assert owner["command"] == ["chown", "60000:60000", "/cache"]


def test_probes_are_those_of_the_balancer() -> None:
    """Two real servers run behind it in tests/load/test_rolling_replacement.py."""
    printed = manifests()
    [container] = pod_of(printed)["containers"]
    assert container["ports"][0]["containerPort"] == printed["Service"]["spec"]["ports"][0]["port"] == PORT == 8080
    paths = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    [checked] = re.findall(r"option httpchk GET (\S+)", (REPOSITORY / "deploy" / "haproxy.cfg").read_text())
    assert paths == {READY_PATH} == {checked}


@pytest.mark.parametrize(("config", "images"), [("h100", "5600m"), ("l4", "1400m"), ("cpu-demo", "5600m")])
def test_autoscaler_has_the_measured_numbers(config: str, images: str) -> None:
    """Half of the largest bucket's rows, without buckets `concurrency_target`, of which 70 % are used."""
    settings = json.loads((REPOSITORY / "truss" / "autoscaling" / "production.json").read_text())
    path = REPOSITORY / "truss" / "configs" / f"{config}.yaml"
    spec = manifests("--config", str(path))["HorizontalPodAutoscaler"]["spec"]
    [metric] = spec["metrics"]
    assert metric["pods"] == {
        "metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": images},
    }  # fmt: skip
    assert (spec["minReplicas"], spec["maxReplicas"]) == (settings["min_replica"], settings["max_replica"])
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == settings["scale_down_delay"]
    development = REPOSITORY / "truss" / "autoscaling" / "development.json"
    spec = manifests("--autoscaling", str(development))["HorizontalPodAutoscaler"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 1)  # not 0: without a pod there is no metric


def test_autoscalers_read_metrics_that_exist() -> None:
    """That of Kubernetes by the rule of the Prometheus adapter, and KEDA's by its own query."""
    gauges = {metric.name for metric in declared_metrics() if metric.kind == "gauge"}
    [rule] = yaml.safe_load((REPOSITORY / "deploy" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == METRIC
    scaled = manifests("--keda", "http://prometheus:9090")["ScaledObject"]["spec"]
    [trigger] = scaled["triggers"]
    assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
    assert trigger["metadata"]["threshold"] == "5.6"
    queries = [rule["metricsQuery"], trigger["metadata"]["query"]]
    for query in queries:
        assert set(re.findall(r"preheat_\w+", query)) == {"preheat_queue_images", "preheat_active_images"} <= gauges
        assert query.count("[60s]") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--namespace", "My_Space"], "--namespace 'My_Space' is not a name of Kubernetes"),
        (["--name", "-x"], "--name '-x' is not a name of Kubernetes"),
        (["--image", "two words"], "--image 'two words' is not the name of an image"),
        (
            ["--store", "s3://bucket/prefix"],
            "The store s3://bucket/prefix is a placeholder. Name your own in",
        ),
        (["--store", "/srv/store"], "A pod does not have the folder /srv/store"),
        (["--store", "srv", "--store-claim", "c"], "A pod does not have the folder srv"),
        (["--store-claim", "c"], "--store-claim is for a store that is a folder, not for s3://models"),
        (["--store", "ftp://x"], "'ftp://x' is not the URL of a store"),
        (["--cache", "/var"], "--cache '/var' is not a cache. Give node:/folder or claim:NAME"),
        (["--cache", "node:var"], "--cache 'node:var' is not a cache"),
        (["--node-label", "gpu"], "--node-label 'gpu' is not a label. Give KEY=VALUE"),
        (["--config", "missing.yaml"], "missing.yaml does not exist"),
        (["--autoscaling", "missing.json"], "missing.json has no autoscaling settings: No such file"),
        (["--autoscaling", str(REPOSITORY / "README.md")], "README.md has no autoscaling settings: Expecting value"),
    ],
)
def test_refuses_what_cannot_be_deployed(options: list[str], message: str) -> None:
    status, output = run(*options)
    assert status == 1 and message in output


@pytest.mark.parametrize("release", ["sdxl", "SDXL/../1", "a/b/c", "/*"])
def test_refuses_a_name_that_is_no_release(release: str) -> None:
    status, output = run(releases=(release,))
    assert status == 1 and "is not a release. Give MODEL/VERSION, or MODEL/*" in output


def test_names_the_wrong_autoscaling_setting(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    settings = json.loads((REPOSITORY / "truss" / "autoscaling" / "production.json").read_text())
    path.write_text(json.dumps(settings | {"max_replica": "8"}))
    status, output = run("--autoscaling", str(path))
    assert status == 1 and 'max_replica: got "8", expected an integer' in output


def test_a_pipe_is_no_autoscaling_file(tmp_path: Path) -> None:
    """Nobody writes into it, so a read would not end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, output = run("--autoscaling", str(pipe))
    assert status == 1 and "pipe has no autoscaling settings: " in output
