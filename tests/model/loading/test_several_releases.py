"""Servers of several releases: in one process, with workers, from a bucket and behind a gateway."""

import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import REGISTRY

from benchmarks.releases import measure_swaps, wait_resident
from engine_builder.adapters.add import add_adapter
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.releases.mirror import copy_release
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.deployment import Deployment, ServedAdapters, resolve_releases
from model.errors import ConfigError, EngineError, ManifestError, ReleaseNotFound, Unavailable
from model.loading.alike import check_alike
from model.loading.load import Loaded
from model.loading.releases import Releases, slot_of
from model.loading.select import Selection, select
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest import Blob, Fp16Steps
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS, Opener
from tests.engine_builder.helpers import edit_json, edit_weights, folder_of, perturb
from tests.support import object_store as ceph
from tests.support.adapters import module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed, load_release
from tests.support.faulty_proxy import FaultyProxy, RecordedRequest
from tests.support.gateway import running_gateway
from tests.support.images import Pixels, largest_difference, pixels
from tests.support.layouts import configured
from tests.support.predictions import PREDICT_PATH, http_client, picture_of

RELEASES = ("toy-sdxl/1", "style/2", "style/1")
PATTERNS = ("toy-sdxl/1", "style/*")
REQUEST = {"prompt": "a red circle", "seed": 3, "num_inference_steps": 4, "output_format": "png"}


@pytest.fixture(scope="module")
def store(
    compiled_toy_store: WritableStore, toy_folder: Path, toy_plan: BuildPlan, tmp_path_factory: pytest.TempPathFactory
) -> WritableStore:
    """A store with the toy, an adapter, and two versions of another model.

    style/1 differs from the toy in the UNet's weights, style/2 also in the VAE's, the scheduler and the defaults.
    """
    folder = tmp_path_factory.mktemp("several")
    store = open_writable_store(shutil.copytree(folder_of(compiled_toy_store), folder / "store"))
    checkpoint = Path(shutil.copytree(toy_folder, folder / "style"))
    for number in range(2):
        edit_weights(checkpoint / "unet", perturb)
        if number:
            edit_weights(checkpoint / "vae", perturb)
            edit_json(checkpoint / "scheduler" / "scheduler_config.json", timestep_spacing="trailing")
            (checkpoint / "defaults.json").write_text('{"guidance_scale": 3.5, "scheduler": "DDIM"}')
        assert build(replace(toy_plan, base=Checkpoint(checkpoint), model="style"), store).compiled == ()
        publish(store, "style")
    text_layers = re.compile(r"text_encoder_2\..*[qv]_proj")  # which all releases share
    deltas = random_deltas(module_shapes(toy_folder), text_layers, rank=2, seed=1, spread=0.5)
    add_adapter(store, "spots", write_adapter(folder / "spots.safetensors", deltas, "kohya"), "style/1")
    return store


def resolved(store: WritableStore, patterns: Sequence[str] = PATTERNS, **changes: Any) -> Releases:
    return Releases(store, Deployment(tuple(patterns), **changes), detect_targets(), ColdStart())


def load(store: WritableStore, **changes: Any) -> list[Loaded]:
    """Load all releases into slots of their own."""
    releases = resolved(store, **changes)
    return [releases.open(index) for index in range(len(releases))]


def image(loaded: Loaded, **fields: Any) -> Pixels:
    params = resolve(GenerationRequest.model_validate(REQUEST | fields), loaded.served)
    picture: Pixels = generate(loaded.model, [params])[0][0]
    return picture


@pytest.fixture(scope="module")
def alone(store: WritableStore) -> dict[str, Pixels]:
    """The image of each release that is loaded alone."""
    images = {name: image(load_release(store, deployed(name), detect_targets(), ColdStart())) for name in RELEASES}
    assert all(largest_difference(images[a], images[b]) > 10 for a, b in combinations(RELEASES, 2))
    return images


def test_images_are_those_of_each_release(store: WritableStore, alone: dict[str, Pixels]) -> None:
    loaded = load(store)
    assert [one.release for one in loaded] == [*RELEASES]
    assert all(np.array_equal(image(one), alone[one.release]) for one in loaded)
    manifests = [store.read_release(name) for name in RELEASES]
    digests = [{digest for record in one.weights for digest in record.identity} for one in manifests]
    common = frozenset.intersection(*map(frozenset, digests))  # they are on the device once
    for one, manifest in zip(loaded[1:], manifests[1:], strict=True):
        own = sum(blob.bytes for record in manifest.weights for blob in record.blobs if blob.sha256 not in common)
        assert one.weight_bytes == pytest.approx(own, rel=0.1) and one.weight_bytes < loaded[0].weight_bytes


@pytest.mark.parametrize("adapters", [(), ("spots",)], ids=["plain", "with an adapter"])
def test_any_release_fills_a_slot(
    store: WritableStore, alone: dict[str, Pixels], adapters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release on the engines of another one has its own weights, tokenizers, schedule and defaults."""
    releases = resolved(store, adapters=ServedAdapters(adapters))
    loaded = [releases.open(0), *map(releases.without_weights, (1, 2))]
    slot = slot_of(loaded[0])
    monkeypatch.setattr("model.loading.load._open_code", lambda *_: pytest.fail("an engine is opened"))
    adapted: dict[str, Pixels] = {}
    for index in (1, 2, 0, 1):
        one = loaded[index]
        releases.fill(index, slot)
        one.model.run_on(slot.model)
        if one.model.adapters is not None and slot.adaptable is not None:
            one.model.adapters.use(slot.adaptable)
            slot.adaptable.renew()
            made = image(one, loras=[{"name": "spots"}])
            assert np.array_equal(made, adapted.setdefault(one.release, made))
            assert not np.array_equal(made, alone[one.release])
        assert np.array_equal(image(one), alone[one.release])
    if adapters:
        monkeypatch.undo()
        deployment = deployed("style/1", adapters=ServedAdapters(adapters))
        expected = image(load_release(store, deployment, detect_targets(), ColdStart()), loras=[{"name": "spots"}])
        assert np.array_equal(adapted["style/1"], expected)


def test_a_release_without_weights_has_its_own_steps_in_fp16(store: WritableStore) -> None:
    releases = resolved(store)
    releases.open(0)
    steps, one = Fp16Steps(first=2, last=1), releases._resolved[1]
    releases._resolved[1] = replace(one, selection=replace(one.selection, fp16_steps=steps))
    assert releases.without_weights(1).model.fp16_steps == steps


def test_opens_equal_tokenizers_once(store: WritableStore) -> None:
    releases = resolved(store)
    first = releases.open(0)
    same = releases.without_weights(1).model.tokenizers
    assert same.keys() == first.model.tokenizers.keys() and same is not first.model.tokenizers
    assert all(same[name] is tokenizer for name, tokenizer in first.model.tokenizers.items())
    one = releases._resolved[0]
    manifest = one.selection.manifest
    others = {name: record.model_copy(update={"max_length": 7}) for name, record in manifest.tokenizers.items()}
    changed = manifest.model_copy(update={"tokenizers": others})
    releases._resolved[0] = replace(one, selection=replace(one.selection, manifest=changed))
    own = releases.without_weights(1).model.tokenizers
    assert own.keys() == first.model.tokenizers.keys()
    assert all(own[name] is not tokenizer for name, tokenizer in first.model.tokenizers.items())


def test_another_slot_needs_the_memory_of_its_weights(store: WritableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the weights that every release has."""
    releases = resolved(store)
    loaded = [releases.open(index) for index in range(2)]
    for free, expected in ((2 * loaded[1].weight_bytes, True), (loaded[1].weight_bytes // 2, False)):
        monkeypatch.setattr("model.loading.releases.free_memory", lambda _, free=free: free)
        assert releases.has_room() == expected
    assert loaded[1].weight_bytes < loaded[0].weight_bytes


def test_another_slot_leaves_the_memory_of_adapters(store: WritableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ServedAdapters(("spots",), cache_bytes=10**9)
    releases = resolved(store, adapters=adapters)
    needed = 2 * releases.open(0).weight_bytes
    for free, expected in ((needed, False), (needed + adapters.cache_bytes, True)):
        monkeypatch.setattr("model.loading.releases.free_memory", lambda _, free=free: free)
        assert releases.has_room() == expected


def test_refuses_weights_that_do_not_fit_a_slot(store: WritableStore) -> None:
    releases = resolved(store)
    slot = slot_of(releases.open(0))
    unet = next(key for key in slot.weights.tensors if key[0] == "unet")
    name, tensor = next(iter(slot.weights.tensors[unet].items()))
    for changed, cause in (
        ({name: tensor[:1]}, f"{name} is torch.float32 .*the device has torch.float32"),
        ({name: tensor.half()}, "the device has torch.float16"),
        ({"more": tensor}, "weights of unet lack more"),
    ):
        tensors = {**slot.weights.tensors, unet: {**slot.weights.tensors[unet], **changed}}
        with pytest.raises(EngineError, match=cause):
            releases.fill(1, replace(slot, weights=replace(slot.weights, tensors=tensors)))
    without = {key: value for key, value in slot.weights.tensors[unet].items() if key != name}
    with pytest.raises(EngineError, match="the device has no such tensor"):
        tensors = {**slot.weights.tensors, unet: without}
        releases.fill(1, replace(slot, weights=replace(slot.weights, tensors=tensors)))


def test_stops_loads(store: WritableStore) -> None:
    releases = resolved(store)
    slot = slot_of(releases.open(0))
    releases.fill(1, slot)
    releases.stop()
    for load_one in (lambda: releases.fill(0, slot), lambda: releases.open(1)):
        with pytest.raises(Unavailable, match="The load was stopped"):
            load_one()


def test_adapters_of_one_release_change_no_other(store: WritableStore, alone: dict[str, Pixels]) -> None:
    loaded = load(store, adapters=ServedAdapters(("spots",)))
    for one in loaded:
        assert not np.array_equal(image(one, loras=[{"name": "spots"}]), alone[one.release])  # stays merged
        for other in loaded:
            assert other is one or np.array_equal(image(other), alone[other.release])


def test_times_of_all_releases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    cold_start = ColdStart()
    monkeypatch.setattr("model.cold_start.time.perf_counter", lambda: next(now))
    for _ in range(2):
        with cold_start.phase("weights"):
            pass
    assert cold_start.phases == {"weights": 2}


def test_a_later_load_is_no_cold_start(store: WritableStore) -> None:
    phases = ("engines", "weights", "warm_up")

    def exported() -> list[float | None]:
        return [REGISTRY.get_sample_value("preheat_cold_start_seconds", {"phase": phase}) for phase in phases]

    cold_start = ColdStart()
    releases = Releases(store, Deployment(PATTERNS), detect_targets(), cold_start)
    warm_up(releases.open(0), cold_start=cold_start)
    before = exported()
    warm_up(releases.open(1))
    assert exported() == before == [pytest.approx(cold_start.phases[phase], abs=1e-4) for phase in phases]


def test_releases_share_the_memory_of_unused_adapters() -> None:
    deployment = Deployment(RELEASES, adapters=ServedAdapters(("spots",), cache_bytes=3000))
    assert deployment.alone(RELEASES[1]) == deployed(RELEASES[1], adapters=ServedAdapters(("spots",), cache_bytes=1000))


def selection_of(store: WritableStore, release: str) -> Selection:
    return select(store.read_release(release), detect_targets(), deployed(release))


def test_refuses_releases_that_differ_in_more_than_weights(store: WritableStore) -> None:
    first, second = (selection_of(store, name) for name in RELEASES[:2])
    check_alike([first, second])
    manifest = second.manifest
    architectures = manifest.architectures | {"unet": "0" * 64}
    unet = second.engines["unet"][0]
    other_code = second.engines | {"unet": [unet.model_copy(update={"key": "0" * 64})]}
    own = [one.model_copy(update={"component": "vae_decoder"}) for one in second.weights["unet"]]
    repeated = second.weights | {"vae_decoder": own}
    for other, cause in (
        (replace(second, manifest=manifest.model_copy(update={"family": "sd"})), "the family sd"),
        (replace(second, manifest=manifest.model_copy(update={"architectures": architectures})), "of unet: 0000"),
        (second.only(second.engines.keys() - {"vae_encoder"}), "Only toy-sdxl/1 has an engine of vae_encoder in fp32"),
        (
            replace(second, engines=other_code),
            f"this engine of unet in fp32 at {unet.bucket.label}: 000000",
        ),
        (replace(second, weights=repeated), "Only style/2 has weights of unet in vae_decoder"),
    ):
        with pytest.raises(ConfigError, match="toy-sdxl/1 and style/2 cannot share a server") as refused:
            check_alike([first, other])
        assert cause in str(refused.value)


def test_resolves_patterns(store: WritableStore) -> None:
    assert resolve_releases(PATTERNS, store) == RELEASES
    assert resolve_releases(("style/1", "style/*"), store) == ("style/1", "style/2")
    for pattern in ("other/*", "../*", "*"):
        with pytest.raises((ReleaseNotFound, ManifestError)):
            resolved(store, [pattern])


# -- servers ----------------------------------------------------------------------------------------------------------


def start_server(
    layout: Layout, folder: Path, store: str, environment: Mapping[str, str] | None = None, **settings: Any
) -> Server:
    """Return a server of all releases at a store's URL, which is not started yet."""
    variables = {"PREHEAT_STORE": store, "PREHEAT_RELEASES": ",".join(PATTERNS)} | dict(environment or {})
    return Server(configured(layout, folder, **settings), environment=variables, log=folder / "log")


SERVERS = {
    "one process": {"workers": 1},
    "two workers": {"workers": 2},
    "two slots": {"workers": 1, "weight_slots": 2, "limits": {"release_turn_seconds": 0.2}},
}


@pytest.fixture(scope="module", params=SERVERS.values(), ids=SERVERS)
def server(
    request: pytest.FixtureRequest, layout: Layout, store: WritableStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with start_server(layout, folder, store.url, loras=["spots"], **request.param) as running:
        running.wait_ready(READY_SECONDS)
        yield running


def check_image(client: httpx.Client, expected: Pixels, query: str = "", **fields: Any) -> None:
    answer = client.post(PREDICT_PATH + query, json=REQUEST | fields)
    # Processes with other numbers of threads sum in another order.
    assert largest_difference(picture_of(answer), expected) <= 1


def test_requests_name_a_release(server: Server, alone: dict[str, Pixels]) -> None:
    with http_client(server) as client:
        for name in RELEASES:
            check_image(client, alone[name], model=name)
        check_image(client, alone["toy-sdxl/1"])
        check_image(client, alone["toy-sdxl/1"], model="toy-sdxl")
        for unknown in ("other", "style/3", "style"):
            answer = client.post(PREDICT_PATH, json=REQUEST | {"model": unknown})
            assert answer.status_code == 400, answer.text
            assert "expected one of toy-sdxl/1, style/2, style/1" in answer.text and answer.json()["field"] == "model"
            assert ("which names 2 releases" in answer.text) == (unknown == "style")
        description = client.post(PREDICT_PATH, json={"prompt": "x", "describe": True, "model": "style/1"}).json()
        assert (description["release"], description["models"]) == ("style/1", [*RELEASES])


def test_requests_of_all_releases_at_once(server: Server, store: WritableStore) -> None:
    """Images of three releases, with and without an adapter, are those of a server of their release alone."""
    requests = [
        {
            "model": RELEASES[number % 3], "seed": number, "num_images": 1 + number % 2,
            "width": (64, 96)[number % 4 < 2],
            "loras": [{"name": "spots", "scale": number / 10}] if number % 5 < 2 else [],
        }
        for number in range(24)
    ]  # fmt: skip
    with http_client(server) as client, ThreadPoolExecutor(len(requests)) as pool:
        answers = [*pool.map(lambda request: client.post(PREDICT_PATH, json=REQUEST | request), requests)]
    adapters = ServedAdapters(("spots",))
    for name in RELEASES:
        loaded = load_release(store, deployed(name, adapters=adapters), detect_targets(), ColdStart())
        for request, answer in zip(requests, answers, strict=True):
            if request["model"] == name:
                made = [pixels(one["data"]) for one in answer.json()["images"]]
                params = resolve(GenerationRequest.model_validate(REQUEST | request), loaded.served)
                for picture, expected in zip(made, generate(loaded.model, [params])[0], strict=True):
                    assert largest_difference(picture, expected) <= 1, request


def test_swaps_of_a_server_are_measured(layout: Layout, store: WritableStore, tmp_path: Path) -> None:
    with start_server(layout, tmp_path, store.url, workers=1, weight_slots=2) as server:
        server.wait_ready(READY_SECONDS)
        wait_resident(server.url, RELEASES[:2], READY_SECONDS)
        swaps = measure_swaps(server.url, RELEASES, REQUEST, runs=1)
    assert len(swaps.swaps) == 4 and min(*swaps.swaps, *swaps.with_swaps, *swaps.without_swaps) > 0


@pytest.mark.parametrize("damage", ["deleted", "changed", "cut"])
def test_a_swap_that_fails_harms_no_other_release(
    layout: Layout, store: WritableStore, alone: dict[str, Pixels], tmp_path: Path, damage: str
) -> None:
    own = open_writable_store(shutil.copytree(folder_of(store), tmp_path / "store"))
    file = folder_of(own) / "blobs" / "sha256" / unet_blob(store, "style/2").sha256
    content = file.read_bytes()
    with start_server(layout, tmp_path, own.url, weight_slots=1) as server, http_client(server) as client:
        server.wait_ready(READY_SECONDS)
        for name in ("style/1", "toy-sdxl/1"):
            check_image(client, alone[name], model=name)
        file.unlink()
        if damage != "deleted":
            changed = content[:-1] + bytes([content[-1] ^ 1])
            file.write_bytes(changed if damage == "changed" else content[:-9])
        for _ in range(2):
            answer = client.post(PREDICT_PATH, json=REQUEST | {"model": "style/2"})
            assert answer.status_code == 503 and "Release style/2 cannot be loaded." in answer.text, answer.text
            assert answer.headers["Retry-After"] == "5"
            for name in ("toy-sdxl/1", "style/1"):
                check_image(client, alone[name], model=name)
        # A missing or cut file is found before a slot is given up.
        fills = {"deleted": 5, "cut": 5, "changed": 6}
        assert f'preheat_release_loads_total{{outcome="fill"}} {fills[damage]}' in client.get("/metrics/").text
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        check_image(client, alone["style/2"], model="style/2")
        page = client.get("/metrics/").text
        assert 'preheat_release_loads_total{outcome="failed"} 2.0' in page
        assert 'preheat_errors_total{kind="release"} 2.0' in page
        assert 'preheat_release_resident{release="style/2"} 1.0' in page


class Bucket:
    """A bucket with all releases, behind a proxy that holds requests for the UNet of style/2 until `may_go` is set."""

    def __init__(self, bucket: WritableStore, proxy: FaultyProxy, store: WritableStore) -> None:
        for name in RELEASES:
            copy_release(store, bucket, name)
        self.url, self.endpoint = bucket.url, proxy.url
        self.asked, self.may_go = threading.Event(), threading.Event()
        self.unet = unet_blob(store, "style/2")
        proxy.on_request = self._hold

    def _hold(self, request: RecordedRequest) -> None:
        if request.method == "GET" and self.unet.sha256 in request.path:
            self.asked.set()
            self.may_go.wait(60)

    def start(self, layout: Layout, folder: Path, **settings: Any) -> Server:
        """Return a server with one slot, which is not started yet."""
        own = {"weight_slots": 1, "endpoint": self.endpoint, "region": "us-east-1", "cache_dir": str(folder / "cache")}
        return start_server(layout, folder, self.url, environment=ceph.credentials(), **own | settings)


@pytest.fixture
def held_bucket(open_bucket: Opener, proxy: FaultyProxy, store: WritableStore) -> Iterator[Bucket]:
    held = Bucket(open_bucket(), proxy, store)
    yield held
    held.may_go.set()


def unet_blob(store: WritableStore, release: str) -> Blob:
    [record] = {one.identity: one for one in store.read_release(release).weights if one.component == "unet"}.values()
    [blob] = record.blobs
    return blob


def refused(client: httpx.Client, name: str) -> str:
    """Request an image of a release that cannot be loaded. Returns the message."""
    answer = client.post(PREDICT_PATH, json=REQUEST | {"model": name})
    assert answer.status_code == 503 and answer.json()["kind"] == "release", answer.text[:1000]
    return str(answer.json()["error"])


def test_a_server_that_was_killed_during_a_swap_leaves_no_damage(
    layout: Layout, held_bucket: Bucket, alone: dict[str, Pixels], tmp_path: Path
) -> None:
    cache = str(tmp_path / "node")
    with ThreadPoolExecutor(1) as pool:
        with held_bucket.start(layout, tmp_path / "first", cache_dir=cache) as server, http_client(server) as client:
            server.wait_ready(READY_SECONDS)
            waiting = pool.submit(client.post, PREDICT_PATH, json=REQUEST | {"model": "style/2"})
            assert held_bucket.asked.wait(60)
            with http_client(server) as other:
                check_image(other, alone["toy-sdxl/1"])  # while the fetch goes on
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                waiting.result()
    held_bucket.may_go.set()
    with held_bucket.start(layout, tmp_path / "next", cache_dir=cache) as server, http_client(server) as client:
        server.wait_ready(READY_SECONDS)
        for name, expected in reversed(alone.items()):
            check_image(client, expected, model=name)


def test_a_release_that_is_withdrawn_during_a_swap_harms_no_other(
    layout: Layout, held_bucket: Bucket, alone: dict[str, Pixels], s3: Any, bucket: str, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as pool, held_bucket.start(layout, tmp_path / "own") as server:
        server.wait_ready(READY_SECONDS)
        with http_client(server) as client, http_client(server) as other:
            waiting = pool.submit(refused, client, "style/2")
            assert held_bucket.asked.wait(60)
            for key in ("releases/style/2.json", f"blobs/sha256/{held_bucket.unet.sha256}"):
                s3.delete_object(Bucket=bucket, Key=key)
            check_image(other, alone["toy-sdxl/1"])
            held_bucket.may_go.set()
            missing = f"Blob {held_bucket.unet.sha256[:12]} is missing from s3://{bucket}"
            assert f"Release style/2 cannot be loaded. {missing}" in waiting.result()
            for name in ("toy-sdxl/1", "style/1"):
                check_image(client, alone[name], model=name)
                refused(client, "style/2")


def test_a_full_cache_costs_no_release_that_is_on_the_device(
    layout: Layout, held_bucket: Bucket, store: WritableStore, alone: dict[str, Pixels], tmp_path: Path
) -> None:
    held_bucket.may_go.set()
    blobs = [selection_of(store, name).blobs(weights=name == "toy-sdxl/1") for name in RELEASES]
    needed = {blob.sha256: blob.bytes for of_release in blobs for blob in of_release}
    limit = sum(needed.values()) + held_bucket.unet.bytes // 2
    with held_bucket.start(layout, tmp_path / "own", cache_bytes=limit) as server, http_client(server) as client:
        server.wait_ready(READY_SECONDS)
        for name in ("style/1", "style/2"):
            assert f"is limited to {limit} bytes" in refused(client, name)
            check_image(client, alone["toy-sdxl/1"])
        assert 'preheat_release_loads_total{outcome="fill"} 0.0' in client.get("/metrics/").text


def test_gateway_offers_each_release(server: Server, alone: dict[str, Pixels]) -> None:
    with running_gateway([server.url]) as url, httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == [*RELEASES]
        for name, expected in alone.items():
            check_image(client, expected, model=name)
            check_image(client, expected, query=f"?model={name}")
        assert client.post(PREDICT_PATH, json=REQUEST | {"model": "style"}).status_code == 404
