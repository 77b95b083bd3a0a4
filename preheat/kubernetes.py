"""Kubernetes manifests of a deployment, from its config.yaml: Deployment, Service, disruption budget, autoscaler.

The image is the one that Truss builds from the same config. Everything that the config states has one place here: the
GPU and memory become requests, the thresholds of `health_checks` become probes, `grace_seconds` becomes the grace
period of the pod, and the names under `secrets` become files of a Secret.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from engine_builder.files import read_file
from engine_builder.truss_config import PLACEHOLDER_STORES, read_preheat_settings, read_truss_config
from gateway.endpoint import READY_PATH
from model.errors import PreheatError
from model.settings import Settings
from model.store.keys import is_release_name
from model.store.store import local_store_folder
from model.validation import StrictModel, explain
from preheat.local_server.demo import release_variables

Manifest = dict[str, Any]
PORT = 8080
USER = 60000  # the user `app` of Truss's images
METRIC = "preheat_images_in_flight"  # deploy/prometheus-adapter.yaml computes it
DRAIN_SECONDS = 5  # from the removal of a pod from the Service until SIGTERM: the nodes update their routes
ANSWER_SECONDS = 5  # after the grace period, to send the answers
_PROBE_SECONDS = 5
# Probe -> threshold of the config, and its value where the config has none.
_PROBES = {
    "startupProbe": ("startup_threshold_seconds", 1800),
    "readinessProbe": ("stop_traffic_threshold_seconds", 30),
    "livenessProbe": ("restart_threshold_seconds", 90),
}
# Folders that the server writes, besides the cache. The image is read-only otherwise.
_SCRATCH = {"tmp": "/tmp", "data": "/app/data", "shm": "/dev/shm"}


class KubernetesOptionError(PreheatError):
    """An option of `preheat kubernetes` cannot be part of a manifest."""


class Autoscaling(StrictModel):
    """The settings in truss/autoscaling. `target_utilization_percentage` of `concurrency_target` adds a replica."""

    min_replica: Annotated[int, Field(ge=0)]
    max_replica: Annotated[int, Field(ge=1)]
    autoscaling_window: Annotated[int, Field(ge=10)]
    scale_down_delay: Annotated[int, Field(ge=0, le=3600)]
    concurrency_target: Annotated[int, Field(ge=1)]
    target_utilization_percentage: Annotated[int, Field(ge=1, le=100)]


@dataclass(frozen=True)
class Pods:
    """What the manifests of one deployment are made of."""

    name: str
    namespace: str
    image: str
    config: Any
    """The TrussConfig."""
    settings: Settings
    """The settings of the config, with the store and releases that are deployed."""
    autoscaling: Autoscaling
    cache: Mapping[str, Any]
    """The volume of fetched blobs."""
    store_claim: str | None
    """The PersistentVolumeClaim with a store that is a folder."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    keda: str | None = None
    """URL of the Prometheus that KEDA reads; None: an autoscaler of Kubernetes itself."""

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "preheat", "app.kubernetes.io/instance": self.name}

    @property
    def images_per_replica(self) -> float:
        """Images in flight, on average over all replicas, above which a replica is added.

        A guided image takes two of the largest bucket's rows.
        """
        rows = [bucket.rows for bucket in self.settings.buckets]
        target = max(1, max(rows) // 2) if rows else self.autoscaling.concurrency_target
        return target * self.autoscaling.target_utilization_percentage / 100


def read_pods(
    releases: Sequence[str],
    namespace: str,
    image: str,
    config: Path,
    autoscaling: Path,
    *,
    name: str = "preheat",
    store: str | None = None,
    store_claim: str | None = None,
    cache: str | None = None,
    node_labels: Sequence[str] = (),
    keda: str | None = None,
) -> Pods:
    """Read the files and check the options. Raises ConfigError, StoreError or KubernetesOptionError.

    cache: `node:/folder` of the node, `claim:NAME` of a PersistentVolumeClaim, or None for a folder of the pod.
    """
    for option, value, first in (("--name", name, "a-z"), ("--namespace", namespace, "a-z0-9")):
        if not re.fullmatch(rf"[{first}]([-a-z0-9]{{0,61}}[a-z0-9])?", value):
            raise KubernetesOptionError(
                f"{option} {value[:80]!r} is not a name of Kubernetes.",
                f"Use up to 63 of a-z, 0-9 and -, the first of {first}.",
            )
    if not image or any(character.isspace() for character in image):
        raise KubernetesOptionError(f"--image {image[:80]!r} is not the name of an image.", "Give REGISTRY/NAME:TAG.")
    for release in releases:
        if not is_release_name(release.removesuffix("*") + "1" if release.endswith("/*") else release):
            raise KubernetesOptionError(f"{release[:80]!r} is not a release.", "Give MODEL/VERSION, or MODEL/*.")
    truss_config = read_truss_config(config)
    environment = truss_config.environment_variables or {}
    variables = release_variables(store or environment.get("PREHEAT_STORE", ""), releases)
    settings = read_preheat_settings(truss_config, variables)
    _check_store(settings.required("store"), store_claim)
    if math.isinf(settings.grace_seconds):
        raise KubernetesOptionError("grace_seconds is infinite, and a pod has a finite grace period.", "Set a number.")
    return Pods(
        name=name,
        namespace=namespace,
        image=image,
        config=truss_config,
        settings=settings,
        autoscaling=_read_autoscaling(autoscaling),
        cache=_cache_volume(cache),
        store_claim=store_claim,
        node_labels=dict(_split_label(label) for label in node_labels),
        keda=keda,
    )


def manifests(pods: Pods) -> list[Manifest]:
    """Return the manifests, in the order in which they are applied."""
    selector = {"matchLabels": pods.labels}
    return [
        _manifest(pods, "v1", "Service", {"selector": pods.labels, "ports": [{"name": "http", "port": PORT}]}),
        _manifest(pods, "apps/v1", "Deployment", _deployment(pods)),
        # One pod at a time may be moved to another node, also the only one.
        _manifest(pods, "policy/v1", "PodDisruptionBudget", {"maxUnavailable": 1, "selector": selector}),
        _scaled_object(pods) if pods.keda else _autoscaler(pods),
    ]


def _check_store(store: str, claim: str | None) -> None:
    if store.rstrip("/") in PLACEHOLDER_STORES:
        raise KubernetesOptionError(
            f"The store {store} is a placeholder.", "Name your own in the config, or with --store."
        )
    folder = local_store_folder(store)
    if folder is not None and (claim is None or not folder.is_absolute()):
        raise KubernetesOptionError(
            f"A pod does not have the folder {store}.",
            "Name s3://bucket/prefix, or file:///folder with --store-claim, the PersistentVolumeClaim to mount there.",
        )
    if folder is None and claim is not None:
        raise KubernetesOptionError(f"--store-claim is for a store that is a folder, not for {store}.", "Leave it out.")


def _read_autoscaling(path: Path) -> Autoscaling:
    try:
        return Autoscaling.model_validate(json.loads(read_file(path)))
    except OSError as error:
        reason = str(error.strerror)
    except ValidationError as error:
        problem = explain(error, Autoscaling)[0]
        reason = f"{problem.field or 'the file'}: {problem.message}"
    except ValueError as error:
        reason = str(error)
    raise KubernetesOptionError(
        f"{path} has no autoscaling settings: {reason}.", "Write it like truss/autoscaling/production.json."
    )


def _cache_volume(cache: str | None) -> Manifest:
    kind, _, value = (cache or "").partition(":")
    if cache is None:
        return {"emptyDir": {}}
    if kind == "node" and value.startswith("/"):
        return {"hostPath": {"path": value, "type": "DirectoryOrCreate"}}
    if kind == "claim" and value:
        return {"persistentVolumeClaim": {"claimName": value}}
    raise KubernetesOptionError(f"--cache {cache[:80]!r} is not a cache.", "Give node:/folder or claim:NAME.")


def _split_label(label: str) -> tuple[str, str]:
    key, equals, value = label.partition("=")
    if not (key and equals and value):
        raise KubernetesOptionError(f"--node-label {label[:80]!r} is not a label.", "Give KEY=VALUE.")
    return key, value


def _manifest(pods: Pods, version: str, kind: str, spec: Manifest) -> Manifest:
    metadata = {"name": pods.name, "namespace": pods.namespace, "labels": pods.labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _deployment(pods: Pods) -> Manifest:
    """Return the spec of a Deployment. The autoscaler sets the number of replicas."""
    startup = _threshold(pods, "startupProbe")
    return {
        "selector": {"matchLabels": pods.labels},
        # The new pod is ready before an old one ends. This needs the GPUs of one more pod.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": startup + 600,  # a node with a GPU may have to be started first
        "template": {
            "metadata": {
                "labels": pods.labels,
                "annotations": {
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(PORT),
                    "prometheus.io/path": "/metrics/",
                },
            },
            "spec": _pod(pods),
        },
    }


def _pod(pods: Pods) -> Manifest:
    cache_is_of_node = "hostPath" in pods.cache
    volumes: list[Manifest] = [
        {"name": "cache", **pods.cache},
        *({"name": name, "emptyDir": {"medium": "Memory"} if name == "shm" else {}} for name in _SCRATCH),
    ]
    mounts: list[Manifest] = [
        {"name": "cache", "mountPath": "/cache"},
        *({"name": name, "mountPath": path} for name, path in _SCRATCH.items()),
    ]
    if pods.config.secrets:
        # Optional: pods may have an identity of the cloud instead of keys.
        volumes.append({"name": "secrets", "secret": {"secretName": f"{pods.name}-secrets", "optional": True}})
        mounts.append({"name": "secrets", "mountPath": "/secrets", "readOnly": True})
    if pods.store_claim is not None:
        claim = {"claimName": pods.store_claim, "readOnly": True}
        volumes.append({"name": "store", "persistentVolumeClaim": claim})
        folder = local_store_folder(pods.settings.store)
        mounts.append({"name": "store", "mountPath": str(folder), "readOnly": True})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # its variables, such as PREHEAT_PORT, look like settings
        "terminationGracePeriodSeconds": DRAIN_SECONDS + math.ceil(pods.settings.grace_seconds) + ANSWER_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"nodeSelector": dict(pods.node_labels)} if pods.node_labels else {}),
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        **({"initContainers": [_cache_owner(pods)]} if cache_is_of_node else {}),
        "containers": [_container(pods, mounts)],
        "volumes": volumes,
    }


def _container(pods: Pods, mounts: list[Manifest]) -> Manifest:
    resources = pods.config.resources
    gpus = {"nvidia.com/gpu": resources.accelerator.count} if resources.accelerator.accelerator else {}
    releases = pods.settings.release_patterns()
    variables = {
        **(pods.config.environment_variables or {}),  # Truss's image does not have them
        **release_variables(pods.settings.store, releases),
        "PREHEAT_CACHE_DIR": "/cache",
        "PREHEAT_GRACE_SECONDS": f"{pods.settings.grace_seconds:g}",
        "HOME": "/tmp",
    }
    return {
        "name": "server",
        "image": pods.image,
        "ports": [{"name": "http", "containerPort": PORT}],
        "env": [{"name": name, "value": str(value)} for name, value in variables.items() if value != ""],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, **gpus},
            "limits": {"memory": resources.memory, **gpus},
        },
        **{name: _probe(pods, name) for name in _PROBES},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_SECONDS)]}}},
        "securityContext": _security(),
        "volumeMounts": mounts,
    }


def _cache_owner(pods: Pods) -> Manifest:
    """Return the container that gives the node's cache folder to the server's user: the kubelet makes it as root."""
    return {
        "name": "cache-owner",
        "image": pods.image,
        "command": ["chown", f"{USER}:{USER}", "/cache"],
        "securityContext": {**_security("CHOWN"), "runAsNonRoot": False, "runAsUser": 0},
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }


def _security(*capabilities: str) -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **({"add": [*capabilities]} if capabilities else {})},
    }


def _probe(pods: Pods, name: str) -> Manifest:
    return {
        "httpGet": {"path": READY_PATH, "port": "http"},
        "periodSeconds": _PROBE_SECONDS,
        "timeoutSeconds": _PROBE_SECONDS,
        "failureThreshold": math.ceil(_threshold(pods, name) / _PROBE_SECONDS),
    }


def _threshold(pods: Pods, probe: str) -> int:
    """Return the seconds after which a probe that fails has an effect."""
    name, default = _PROBES[probe]
    seconds: int | None = getattr(pods.config.runtime.health_checks, name)
    return default if seconds is None else seconds


def _scale_down(pods: Pods) -> Manifest:
    return {"scaleDown": {"stabilizationWindowSeconds": pods.autoscaling.scale_down_delay}}


def _autoscaler(pods: Pods) -> Manifest:
    target = {"type": "AverageValue", "averageValue": f"{round(pods.images_per_replica * 1000)}m"}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": pods.name},
        "minReplicas": max(1, pods.autoscaling.min_replica),
        "maxReplicas": pods.autoscaling.max_replica,
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": METRIC}, "target": target}}],
        "behavior": _scale_down(pods),
    }
    return _manifest(pods, "autoscaling/v2", "HorizontalPodAutoscaler", spec)


def _scaled_object(pods: Pods) -> Manifest:
    """Return KEDA's counterpart of `_autoscaler`. Not to zero: without a pod there is no metric that adds one."""
    pod = f"{pods.name}-[a-z0-9]+-[a-z0-9]+"  # of the Deployment's ReplicaSets
    series = f'{{namespace="{pods.namespace}", pod=~"{pod}"}}[{pods.autoscaling.autoscaling_window}s]'
    names = ("preheat_queue_images", "preheat_active_images")
    query = " + ".join(f"sum(avg_over_time({name}{series}))" for name in names)
    trigger = {"serverAddress": pods.keda, "query": query, "threshold": f"{pods.images_per_replica:g}"}
    spec = {
        "scaleTargetRef": {"name": pods.name},
        "minReplicaCount": max(1, pods.autoscaling.min_replica),
        "maxReplicaCount": pods.autoscaling.max_replica,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _scale_down(pods)}},
        "triggers": [{"type": "prometheus", "metadata": trigger}],
    }
    return _manifest(pods, "keda.sh/v1alpha1", "ScaledObject", spec)
