"""Loading a release: what fits is served, and everything else is refused by a sentence that carries its remedy.

Engines and weights are real ones of a small linear network; the refusals are met where a server meets them, in
`load_release`.
"""

import copy
import gc
import json
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.engines.graphed import GraphedEngine
from model.engines.signatures import Widths, unet_signature
from model.engines.tensorrt.plans import Plans
from model.errors import (
    CorruptBlob,
    EngineError,
    ManifestError,
    MissingComponent,
    NoEngineForTarget,
    OutOfDeviceMemory,
    PreheatError,
    ReleaseNotFound,
    StoreError,
)
from model.loading import load as loading
from model.loading.load import Loaded, load_release
from model.loading.memory import check_memory, free_host_memory, loop_bytes
from model.loading.select import choose_engines, select
from model.loading.served import SizeList, SizeRange
from model.loading.target import Target
from model.settings import ServedBucket
from model.store.manifest import Bucket, Span
from model.store.manifest_json import parse_manifest
from model.validation import MAX_STEPS
from tests.support import releases
from tests.support.components import BASE_COMPONENTS, CFG_VARIANTS, REFINER_COMPONENTS
from tests.support.releases import NAME, Toy, cpu_target, put_blob

REPOSITORY = Path(__file__).resolve().parents[1]
UNET = BASE_COMPONENTS.index("unet")  # among a release's engines and weights
Entries = dict[str, Any]
Damage = Callable[[Entries], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[WritableLocalStore, bytes]:
    """A store with a release that loads, and its manifest. Not to be written to."""
    store = WritableLocalStore(tmp_path_factory.mktemp("sound") / "store")
    manifest = releases.draft(store, releases.compiled_toy())
    store.write_release(manifest)
    return store, manifest.to_json()


@pytest.fixture
def store(sound: tuple[WritableLocalStore, bytes], tmp_path: Path) -> WritableLocalStore:
    """A copy of it, to be damaged."""
    return WritableLocalStore(shutil.copytree(sound[0].root, tmp_path / "store"))


@pytest.fixture
def entries(sound: tuple[WritableLocalStore, bytes]) -> Entries:
    """Its manifest as JSON, to be damaged and put back with `releases.write_manifest`."""
    return json.loads(sound[1])


def load(
    store: WritableLocalStore,
    name: str = NAME,
    targets: list[Target] | None = None,
    buckets: list[ServedBucket] | None = None,
) -> Loaded:
    return load_release(store, name, targets or [cpu_target()], buckets or [], ColdStart())


def refusal(kind: type[PreheatError], store: WritableLocalStore, **how: Any) -> str:
    """The message of exactly this kind of error, and no more than a reader reads."""
    with pytest.raises(PreheatError) as caught:
        load(store, **how)
    assert type(caught.value) is kind, repr(caught.value)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 900
    return message


def damaged(store: WritableLocalStore, entries: Entries, damage: Damage) -> WritableLocalStore:
    damage(entries)
    releases.write_manifest(store.root, entries)
    return store


def blob_path(store: WritableLocalStore, digest: str) -> Path:
    return store.root / "blobs" / "sha256" / digest


# -- what is served -----------------------------------------------------------------------------------------------


def test_a_sound_release_is_served(sound: tuple[WritableLocalStore, bytes]) -> None:
    cold_start = ColdStart()
    loaded = load_release(sound[0], NAME, [cpu_target()], [], cold_start)
    assert (loaded.release, loaded.target, loaded.runtime) == (NAME, cpu_target().key, "aot_inductor")
    assert loaded.served.sizes == SizeRange(64, 512, 8) and not loaded.served.has_refiner
    assert loaded.served.defaults.num_inference_steps == 4
    toy_bytes = sum(tensor.nbytes for tensor in releases.toy_tensors(0).values())
    assert loaded.weight_bytes == len(BASE_COMPONENTS) * toy_bytes
    assert {"resolve", "weights", "engines"} <= cold_start.phases.keys()
    for seed, name in enumerate(BASE_COMPONENTS):
        x = torch.randn(6, 4, 8, 8)  # more rows than its bucket
        torch.testing.assert_close(loaded.model.engines[name].run({"x": x}, 64, 64)["y"], Toy(seed)(x)[0])


def test_refiner_shares_equal_weights(store: WritableLocalStore) -> None:
    """A text encoder with the base's weights is neither fetched nor opened a second time."""
    manifest = releases.draft(store, releases.compiled_toy(), refiner=True)
    second = next(record for record in manifest.weights if record.component == "text_encoder_2")
    shared = tuple(
        record.model_copy(update={"blobs": second.blobs}) if record.component == "refiner_text_encoder_2" else record
        for record in manifest.weights
    )
    store.write_release(manifest.model_copy(update={"version": "2"}))
    store.write_release(manifest.model_copy(update={"version": "3", "weights": shared}))
    for name, expected in (("toy/2", {}), ("toy/3", {"refiner_text_encoder_2": "text_encoder_2"})):
        selection = select(store.read_release(name), [cpu_target()], [])
        assert selection.shared == expected
        assert selection.engines.keys() == selection.weights.keys()
        assert selection.engines.keys() == {*BASE_COMPONENTS, *REFINER_COMPONENTS} - expected.keys()
    apart, together = load(store, "toy/2"), load(store, "toy/3")
    assert apart.served.has_refiner and together.served.has_refiner
    assert apart.model.engines["refiner_text_encoder_2"] is not apart.model.engines["text_encoder_2"]
    assert together.model.engines["refiner_text_encoder_2"] is together.model.engines["text_encoder_2"]
    assert together.model.engines.keys() == {*BASE_COMPONENTS, *REFINER_COMPONENTS}
    assert together.weight_bytes == apart.weight_bytes * 9 // 10


def test_a_machine_runs_engines_of_a_level_below_its_own(sound: tuple[WritableLocalStore, bytes]) -> None:
    better = replace(cpu_target(), product="x86_64_v9")
    assert load(sound[0], targets=[better, cpu_target()]).target == cpu_target().key


def test_configured_buckets_narrow_the_sizes(sound: tuple[WritableLocalStore, bytes]) -> None:
    buckets = [ServedBucket(height=64, width=64, rows=2), ServedBucket(height=128, width=256, rows=2)]
    assert load(sound[0], buckets=buckets).served.sizes == SizeList(((64, 64), (256, 128)))


def test_buckets_do_not_narrow_what_has_no_size(store: WritableLocalStore) -> None:
    """On a GPU the times of 32 steps are embedded at once: more rows than any bucket of the UNet has."""
    manifest = releases.draft(store)
    [time] = [engine for engine in manifest.engines if engine.component == "unet_time"]
    wide = time.model_copy(update={"bucket": Bucket(batch=Span(min=32, max=32))})
    manifest = manifest.model_copy(update={"engines": (wide,)})
    assert choose_engines(manifest, "unet_time", wide.target, [ServedBucket(height=64, width=64, rows=2)]) == [wide]


def test_each_engine_gets_the_weights_of_its_own_layout(store: WritableLocalStore, entries: Entries) -> None:
    """Two engines of a component in two layouts: the second must not run on the first's weights."""
    second = copy.deepcopy(entries["engines"][UNET]) | {"layout": "other", "key": "0" * 64}
    second["bucket"]["rows"] = {"min": 1, "max": 9, "multiple": 1}
    blob = put_blob(store, save(dict(Toy(77).named_parameters())))
    weights = {"component": "unet", "precision": "fp32", "layout": "other", "blobs": [blob.model_dump()]}
    entries["engines"].append(second)
    entries["weights"].append(weights)
    releases.write_manifest(store.root, entries)
    first, other = load(store).model.engines["unet"].engines
    x = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(first.run({"x": x})["y"], Toy(UNET)(x)[0])
    torch.testing.assert_close(other.run({"x": x})["y"], Toy(77)(x)[0])


def test_quantized_engines_are_served_only_where_there_is_nothing_better(
    store: WritableLocalStore, entries: Entries
) -> None:
    for record in (entries["engines"][UNET], entries["weights"][UNET]):
        record["precision"] = "int8"
    releases.write_manifest(store.root, entries)
    assert load(store).release == NAME
    fp8 = copy.deepcopy(entries["engines"][3]) | {"precision": "fp8", "key": "0" * 64}
    entries["engines"].insert(0, fp8)
    releases.write_manifest(store.root, entries)
    assert load(store).release == NAME, "there are no fp8 weights, and none are asked for"


# -- what is refused ----------------------------------------------------------------------------------------------


def test_no_release_of_that_name(store: WritableLocalStore) -> None:
    message = refusal(ReleaseNotFound, store, name="toy/2")
    assert (
        "Release toy/2 was not found" in message
        and "Available: toy/1" in message
        and "`preheat publish toy/2" in message
    )


@pytest.mark.parametrize("name", ["toy", "../../etc/passwd", "toy/1/1", "", "toy/1.json/.."])
def test_what_is_no_release_name(store: WritableLocalStore, name: str) -> None:
    assert "Write model/version" in refusal(ManifestError, store, name=name)


def test_no_engine_for_this_target(store: WritableLocalStore) -> None:
    message = refusal(NoEngineForTarget, store, targets=[Target("cuda", "h200", "sm90", "torch2.13-cu130")])
    assert "cuda-h200-sm90-torch2.13-cu130" in message and f"has engines for {cpu_target().key}" in message
    assert "`preheat build` on such a machine" in message and "`preheat publish`" in message


def test_no_engine_for_one_component(store: WritableLocalStore, entries: Entries) -> None:
    damaged(store, entries, lambda e: e["engines"].pop(2))
    message = refusal(NoEngineForTarget, store)
    assert "for its unet" in message and "`preheat build`" in message


def test_no_engine_at_all(store: WritableLocalStore, entries: Entries) -> None:
    damaged(store, entries, lambda e: e["engines"].clear())
    assert "has engines for nothing" in refusal(NoEngineForTarget, store)


def test_an_engine_of_a_runtime_that_is_not_here(store: WritableLocalStore, entries: Entries) -> None:
    damaged(store, entries, lambda e: e["engines"][UNET].update(runtime="tensorrt"))
    message = refusal(NoEngineForTarget, store)
    assert "no unet engine" in message and "AOTInductor" in message and "`preheat build`" in message


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "unet", "vae_decoder"])
def test_a_missing_component(store: WritableLocalStore, entries: Entries, component: str) -> None:
    def drop(e: Entries) -> None:
        del e["architectures"][component]
        for kind in ("engines", "weights"):
            e[kind] = [record for record in e[kind] if record["component"] != component]

    damaged(store, entries, drop)
    message = refusal(MissingComponent, store)
    assert f"lacks {component}." in message and "`preheat build`, `preheat publish`" in message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda e: e["weights"].pop(1), "lacks text_encoder_2."),
        (lambda e: e["tokenizers"].pop("tokenizer_2"), "lacks tokenizer_2."),
        (lambda e: e["schedulers"].pop("base"), "lacks base scheduler."),
        (lambda e: e["weights"][UNET].update(precision="fp16"), "no fp32 weights of unet in layout plain"),
        (lambda e: e["weights"][UNET].update(layout="fused"), "no fp32 weights of unet in layout plain"),
    ],
    ids=["weights", "tokenizer", "scheduler", "precision", "layout"],
)
def test_a_missing_part(store: WritableLocalStore, entries: Entries, damage: Damage, words: str) -> None:
    damaged(store, entries, damage)
    message = refusal(MissingComponent, store)
    assert words in message and "`preheat build`, `preheat publish`" in message


def test_half_a_refiner(store: WritableLocalStore, entries: Entries) -> None:
    refiner = {"force_zeros_for_empty_prompt": True, "requires_aesthetics_score": False}
    damaged(store, entries, lambda e: e["settings"].update(refiner=refiner))
    message = refusal(MissingComponent, store)
    assert f"lacks {', '.join(REFINER_COMPONENTS)}, refiner scheduler" in message


def test_a_newer_schema(store: WritableLocalStore, entries: Entries) -> None:
    damaged(store, entries, lambda e: e.update(schema_version=2, new_things=[]))
    message = refusal(ManifestError, store)
    assert "schema 2" in message and "Upgrade Preheat" in message and "`preheat build`" in message


def test_a_damaged_manifest(store: WritableLocalStore, entries: Entries) -> None:
    path = store.root / "releases" / "toy" / "1.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert "is not JSON" in (message := refusal(ManifestError, store)) and "`preheat publish`" in message
    damaged(store, entries, lambda e: e["settings"].pop("latent_channels"))
    assert "damaged at settings.latent_channels" in refusal(ManifestError, store)


def test_another_release_under_this_name(store: WritableLocalStore) -> None:
    releases.write_manifest(store.root, (store.root / "releases/toy/1.json").read_bytes(), "toy/9")
    message = refusal(ManifestError, store, name="toy/9")
    assert "toy/9 is that of toy/1" in message and "`preheat publish`" in message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda e: e["defaults"].update(use_refiner=True), "`preheat build --refiner`"),
        (lambda e: e["defaults"].update(num_inference_steps=1000), "num_inference_steps"),
        (lambda e: e["defaults"].update(scheduler="Heun"), "scheduler"),
        (lambda e: e["defaults"].update(colour="red"), "colour"),
        (lambda e: e["schedulers"]["base"].update(prediction_type="v_prediction"), "prediction_type"),
        (lambda e: e["schedulers"]["base"].update(beta_start="0.1"), "beta_start"),
        (lambda e: e["schedulers"]["base"].pop("beta_end"), "beta_end"),
        (lambda e: e["schedulers"]["base"].update(steps_offset=10**400), "steps_offset"),
    ],
)  # fmt: skip
def test_defaults_and_schedules_that_cannot_be_served(
    store: WritableLocalStore, entries: Entries, damage: Damage, words: str
) -> None:
    damaged(store, entries, damage)
    assert words in refusal(ManifestError, store)


def test_engines_of_a_component_with_different_signatures(store: WritableLocalStore, entries: Entries) -> None:
    shutil.rmtree(store.root / "blobs")
    second = copy.deepcopy(entries["engines"][UNET]) | {"key": "0" * 64}
    second["signature"]["outputs"][0]["name"] = "other"
    damaged(store, entries, lambda e: e["engines"].append(second))
    assert "unet engines of release toy/1 differ" in refusal(EngineError, store)


def test_a_bucket_that_is_not_built(store: WritableLocalStore) -> None:
    message = refusal(
        NoEngineForTarget,
        store,
        buckets=[ServedBucket(height=64, width=64, rows=2), ServedBucket(height=768, width=1024, rows=2)],
    )
    assert "1024x768 with a batch of at most 2" in message and "`preheat build --size 1024x768@2`" in message
    assert "remove that bucket from the config" in message


def test_buckets_without_the_native_size(store: WritableLocalStore) -> None:
    message = refusal(NoEngineForTarget, store, buckets=[ServedBucket(height=128, width=128, rows=2)])
    assert (
        "default size of release toy/1, 64x64, is not loaded" in message
        and "128x128" in message
        and "config's buckets" in message
    )


def make_static(entries: Entries, *sizes: tuple[int, int], component: str) -> None:
    """Cut the dynamic engine of a component into one for each size (height, width)."""
    dynamic = next(engine for engine in entries["engines"] if engine["component"] == component)
    entries["engines"].remove(dynamic)
    for number, (height, width) in enumerate(sizes):
        engine = copy.deepcopy(dynamic) | {"key": f"{number:064d}"}
        engine["bucket"]["height"] = {"min": height, "max": height, "multiple": 1}
        engine["bucket"]["width"] = {"min": width, "max": width, "multiple": 1}
        entries["engines"].append(engine)


def test_static_engines_beside_dynamic_ones_serve_their_sizes(store: WritableLocalStore, entries: Entries) -> None:
    make_static(entries, (64, 64), (128, 64), component="unet")
    releases.write_manifest(store.root, entries)
    assert load(store).served.sizes == SizeList(((64, 64), (64, 128)))
    make_static(entries, (64, 64), (64, 256), component="vae_decoder")
    releases.write_manifest(store.root, entries)
    assert load(store).served.sizes == SizeList(((64, 64),))


def test_variants_are_loaded_with_their_unet(store: WritableLocalStore, entries: Entries) -> None:
    plain = load(store)
    make_static(entries, (64, 64), (128, 64), component="unet")
    small, _ = [engine for engine in entries["engines"] if engine["component"] == "unet"]
    of_no_bucket = small | {"bucket": small["bucket"] | {"rows": {"min": 4, "max": 4, "multiple": 1}}}
    [weights] = [record for record in entries["weights"] if record["component"] == "unet"]
    for index, name in enumerate(CFG_VARIANTS):
        for number, engine in enumerate((small, small | {"precision": "bf16"}, of_no_bucket)):
            entries["engines"].append(engine | {"component": name, "key": f"{number:062d}f{index}"})
        entries["weights"].append(weights | {"component": name})
        entries["architectures"][name] = entries["architectures"]["unet"]
    releases.write_manifest(store.root, entries)
    loaded = load(store)
    unet = loaded.model.engines["unet"]
    assert [engine.component for engine in unet.engines] == ["unet"] * 2
    for layout, name in (("uncond", "unet_unconditional"), ("both", "unet_guided")):
        [engine] = unet.of_size(64, 64, layout)  # type: ignore[arg-type]
        assert engine.bucket == Bucket.model_validate(small["bucket"]) and engine.component == name
        assert unet.of_size(128, 64, layout) == []  # type: ignore[arg-type]
    assert loaded.weight_bytes == plain.weight_bytes  # the UNet's, once
    assert loaded.served.sizes == SizeList(((64, 64), (64, 128)))  # variants do not narrow the sizes
    assert loaded.model.engines.keys() == plain.model.engines.keys() == {*BASE_COMPONENTS}
    assert not any(plain.model.engines["unet"].variants.values())


def test_variant_with_another_signature_is_refused(store: WritableLocalStore, entries: Entries) -> None:
    shutil.rmtree(store.root / "blobs")
    [unet] = [engine for engine in entries["engines"] if engine["component"] == "unet"]
    variant = copy.deepcopy(unet) | {"component": "unet_guided", "key": "0" * 64}
    variant["signature"]["outputs"][0]["name"] = "other"
    entries["engines"].append(variant)
    [weights] = [record for record in entries["weights"] if record["component"] == "unet"]
    entries["weights"].append(weights | {"component": "unet_guided"})
    entries["architectures"]["unet_guided"] = entries["architectures"]["unet"]
    releases.write_manifest(store.root, entries)
    assert "unet engines of release toy/1 differ" in refusal(EngineError, store)


def test_gpu_engines_outside_of_loops_have_their_own_graphs(
    sound: tuple[WritableLocalStore, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops capture their engines in their own graphs, and a graph within a graph cannot be captured."""

    class Opened:
        signature = bucket = None

        def __init__(self, component: str, *_: object) -> None:
            self.component = component

    store, manifest = sound
    monkeypatch.setattr(loading, "AotInductorEngine", Opened)
    record = parse_manifest(manifest, NAME).engines[0]
    contents = {record.blob.sha256: releases.compiled_toy().engine, record.constants.sha256: b""}
    graphed: dict[str, set[str]] = {"cuda": set(), "cpu": set()}
    names = {*BASE_COMPONENTS, *REFINER_COMPONENTS, *CFG_VARIANTS}
    for kind, name in ((kind, name) for kind in graphed for name in names):
        device = torch.device(kind)
        of_it = record.model_copy(update={"component": name})
        engine = loading._open_engine(contents, of_it, {}, device, Plans(store, device))
        assert engine.component == name
        graphed[kind] |= {name} if isinstance(engine, GraphedEngine) else set()
    assert graphed == {"cuda": names - {"unet", "refiner_unet", *CFG_VARIANTS}, "cpu": set()}


def test_components_without_a_size_in_common(store: WritableLocalStore, entries: Entries) -> None:
    make_static(entries, (64, 64), component="unet")
    make_static(entries, (128, 128), component="vae_decoder")
    releases.write_manifest(store.root, entries)
    message = refusal(NoEngineForTarget, store)
    assert "64x64" in message and "`preheat build`" in message


def test_a_gpu_too_small_for_the_weights(
    monkeypatch: pytest.MonkeyPatch, sound: tuple[WritableLocalStore, bytes]
) -> None:
    manifest = parse_manifest(sound[1], NAME)
    selection = select(manifest, [cpu_target()], [])
    needed = sum({blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}.values())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 2**34))
    check_memory(torch.device("cuda:0"), selection)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 2**34))
    with pytest.raises(OutOfDeviceMemory, match="use a GPU with more memory"):
        check_memory(torch.device("cuda:0"), selection)


def test_refuses_weights_beyond_the_memory_of_a_cpu(store: WritableLocalStore, entries: Entries) -> None:
    """The kernel would kill the server while it loads. No blob is read: they do not exist."""
    blobs = [{"sha256": f"{number:064x}", "bytes": 2**28} for number in range(8000)]
    entries["weights"][0]["blobs"] = blobs
    releases.write_manifest(store.root, entries)
    message = refusal(OutOfDeviceMemory, store)
    assert "The weights take 2000.0 GiB, and this machine has " in message and "container's limit" in message


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert free_host_memory(meminfo, cgroup) is None
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:  500 kB\nHugePages_Total:  0\nSwapFree:  100 kB\n")
    assert free_host_memory(meminfo, cgroup) == 600 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("300000\n")
    (cgroup / "memory.stat").write_text("anon 100000\nactive_file 30000\ninactive_file 50000\n")
    assert free_host_memory(meminfo, cgroup) == 600 * 1024
    (cgroup / "memory.max").write_text("400000\n")
    assert free_host_memory(meminfo, cgroup) == 180_000
    (cgroup / "memory.max").write_text("900000000\n")
    assert free_host_memory(meminfo, cgroup) == 600 * 1024


def test_buffers_of_all_loops_are_counted_before_any_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two sizes, each for its largest batch. A UNet's variants use the buffers of its loop."""
    store, target = WritableLocalStore(tmp_path), Target("cuda", "h200", "sm90", "torch2.13-cu130")
    widths = Widths(
        tokens=77, text_width=8, text_width_2=8, pooled_width=8, context_width=16, latent_channels=4, time_ids=6,
        vae_scale=8, time_embeds_width=1280, keys_values_width=166_400,
    )  # fmt: skip
    unet = unet_signature(widths, "float32")
    engines = []
    for engine in releases.draft(store).engines:
        engine = engine.model_copy(update={"target": target.key})
        if engine.component != "unet":
            engines.append(engine)
            continue
        for batch, side in ((1, 64), (2, 64), (8, 64), (4, 128)):
            sides = Span(min=side, max=side)
            bucket = Bucket(batch=Span(min=batch, max=batch), height=sides, width=sides)
            key = f"{len(engines):064x}"
            engines.append(engine.model_copy(update={"key": key, "bucket": bucket, "signature": unet}))
    manifest = releases.draft(store).model_copy(update={"engines": tuple(engines)})
    unets = [engine for engine in engines if engine.component == "unet"]
    buffers = loop_bytes({"unet": unets})
    larger = unets[-1].bucket.model_copy(update={"batch": Span(min=16, max=16)})
    variant = unets[-1].model_copy(update={"component": "unet_guided", "bucket": larger})
    assert loop_bytes({"unet": [*unets, variant]}) == buffers
    texts = (8 + 4) * (2 * 77 * 166_400 + MAX_STEPS * 1280) * 4
    assert texts < buffers < 1.01 * texts
    store.write_release(manifest)
    weights = sum({blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}.values())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights + buffers - 1, 2**34))
    monkeypatch.setattr(store, "get", lambda *_: pytest.fail("a blob was read"))
    with pytest.raises(OutOfDeviceMemory, match="Configure smaller batches .* or fewer sizes"):
        load_release(store, NAME, [target], [], ColdStart())


# -- blobs that are not what they were ----------------------------------------------------------------------------


def every_blob(entries: Entries) -> dict[str, str]:
    """One digest of each kind."""
    return {
        "engine": entries["engines"][0]["blob"]["sha256"],
        "constants": entries["engines"][0]["constants"]["sha256"],
        "first weights": entries["weights"][0]["blobs"][0]["sha256"],
        "last weights": entries["weights"][-1]["blobs"][-1]["sha256"],
        "tokenizer": entries["tokenizers"]["tokenizer"]["blob"]["sha256"],
    }


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


@pytest.mark.parametrize("which", ["engine", "constants", "first weights", "last weights", "tokenizer"])
def test_a_blob_that_is_not_its_digest(store: WritableLocalStore, entries: Entries, which: str) -> None:
    digest = every_blob(entries)[which]
    path = blob_path(store, digest)
    data = path.read_bytes()
    half = len(data) // 2
    for bad, words in (
        (flip(data, 0), "bytes have changed"),
        (flip(data, half), "bytes have changed"),
        (flip(data, len(data) - 1), "bytes have changed"),
        (data[:half], f"{half} bytes instead of {len(data)}"),
        (b"", f"0 bytes instead of {len(data)}"),
        (data + b"\0", f"{len(data) + 1} bytes instead of {len(data)}"),
    ):
        path.write_bytes(bad)
        message = refusal(CorruptBlob, WritableLocalStore(store.root))
        assert digest[:12] in message and words in message
        assert "`preheat verify`" in message and "delete it" in message and "`preheat build`" in message
    path.unlink()
    message = refusal(CorruptBlob, WritableLocalStore(store.root))
    assert digest[:12] in message and "is missing" in message and "`preheat build`, `preheat publish`" in message


def test_blobs_of_one_size_that_changed_places(store: WritableLocalStore, entries: Entries) -> None:
    one, two = (blob_path(store, entries["weights"][index]["blobs"][0]["sha256"]) for index in (0, 2))
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second) and first != second
    one.write_bytes(second)
    two.write_bytes(first)
    assert "bytes have changed" in refusal(CorruptBlob, store)


def publish_weights(store: WritableLocalStore, entries: Entries, tensors: dict[str, torch.Tensor] | bytes) -> None:
    blob = put_blob(store, tensors if isinstance(tensors, bytes) else save(tensors))
    entries["weights"][UNET]["blobs"] = [blob.model_dump()]
    releases.write_manifest(store.root, entries)


def test_weights_that_do_not_fit_their_engine(store: WritableLocalStore, entries: Entries) -> None:
    """Their digests are right: someone published them so."""
    good = releases.toy_tensors(0)
    again = "`preheat build`, `preheat publish`"
    for tensors, words in (
        ({name: tensor for name, tensor in good.items() if name != "a.bias"}, "weights of unet lack a.bias"),
        (good | {"a.bias": torch.zeros(7)}, "a.bias is float32 [7], expected float32 [8]"),
        (good | {"a.bias": torch.zeros(8, dtype=torch.float64)}, "a.bias is float64 [8], expected float32 [8]"),
        ({}, "weights of unet lack"),
    ):
        publish_weights(store, entries, tensors)
        message = refusal(EngineError, store)
        assert words in message and again in message
    publish_weights(store, entries, b"no tensors")
    message = refusal(CorruptBlob, store)
    assert "not a safetensors file" in message and again in message


def test_an_engine_blob_that_is_no_engine(store: WritableLocalStore, entries: Entries) -> None:
    releases.write_manifest(store.root, entries | {"engines": []})
    for part, data in (("blob", b"no engine"), ("constants", b"[]"), ("constants", b'{"a.weight": {}}')):
        changed = copy.deepcopy(entries)
        changed["engines"][UNET][part] = put_blob(store, data).model_dump()
        releases.write_manifest(store.root, changed)
        message = refusal(EngineError, store)
        assert "unet engine cannot be opened" in message and "`preheat build`" in message


def test_a_tokenizer_blob_that_is_no_tokenizer(store: WritableLocalStore, entries: Entries) -> None:
    entries["tokenizers"]["tokenizer"]["blob"] = put_blob(store, b"{}").model_dump()
    releases.write_manifest(store.root, entries)
    assert "tokenizer.json cannot be read" in refusal(MissingComponent, store)


def test_what_the_manifest_can_tell_is_told_before_any_blob_is_read(
    store: WritableLocalStore, entries: Entries
) -> None:
    shutil.rmtree(store.root / "blobs")
    for damage, kind in (
        (lambda e: e["weights"].pop(1), MissingComponent),
        (lambda e: e["defaults"].update(colour="red"), ManifestError),
        (lambda e: e["schedulers"]["base"].pop("beta_end"), ManifestError),
        (lambda e: e["engines"][UNET].update(runtime="tensorrt"), NoEngineForTarget),
    ):
        refusal(kind, damaged(store, copy.deepcopy(entries), damage))
    releases.write_manifest(store.root, entries)
    assert "is missing" in refusal(CorruptBlob, store)


# -- things that are no files ------------------------------------------------------------------------------------


def test_things_that_are_no_files_among_the_blobs(store: WritableLocalStore, entries: Entries) -> None:
    path = blob_path(store, entries["weights"][0]["blobs"][0]["sha256"])
    path.unlink()
    path.mkdir()
    assert "cannot be read" in refusal(StoreError, store)


# -- what a cold start imports ------------------------------------------------------------------------------------

HEAVY = (
    "diffusers", "transformers", "torch._inductor", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy",
    "networkx", "scipy", "boto3", "botocore", "engine_builder", "matplotlib", "accelerate", "huggingface_hub", "truss",
)  # fmt: skip
# What the server image has, and what those packages need in turn. One more is one more second of every cold start.
THIRD_PARTY = {
    "torch", "torchgen", "functorch", "numpy", "tqdm", "typing_extensions",  # torch and what it imports by itself
    "pynvml",  # by torch, where it is installed: for benchmarks here, in no server's image
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection",
    "tokenizers", "PIL", "prometheus_client",
    "starlette", "anyio", "sniffio", "idna",
    "model",
}  # fmt: skip

REPORT = """
    import importlib.util, json

    def report(before):
        names = sorted(set(sys.modules) - before)
        third = set()
        for name in {name.partition(".")[0] for name in names}:
            origin = getattr(sys.modules.get(name), "__file__", None) or ""
            if "-packages" in origin or name == "model":
                third.add(name)
        print(json.dumps({"modules": names, "third_party": sorted(third)}))
"""


def imported(script: str, *arguments: object) -> tuple[set[str], set[str]]:
    """Modules, and top-level packages that are not Python's own, that a script imports in a fresh interpreter."""
    whole = "import sys\nbefore = set(sys.modules)\n" + textwrap.dedent(REPORT) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", whole + "\nreport(before)\n", *map(str, arguments)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return set(said["modules"]), set(said["third_party"])


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules for big in HEAVY if name == big or name.startswith(big + ".")}


def test_importing_the_model_leaves_torch_for_later() -> None:
    """Truss imports it, makes it, and only then loads it: by the time torch is imported, blobs are on their way."""
    modules, third_party = imported("import model.model")
    assert not heavy(modules) and "torch" not in modules
    assert third_party <= THIRD_PARTY - {"torch", "tokenizers", "PIL"}, third_party


def test_importing_the_model_starts_no_thread() -> None:
    imported("import threading, model.model; assert threading.active_count() == 1, threading.enumerate()")


def test_making_the_model_starts_the_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.model import Model

    started: list[bool] = []
    monkeypatch.setattr("model.loading.preload_torch.start", lambda: started.append(True))
    Model(config={})
    assert started


def test_preloads_torch_libraries() -> None:
    script = """
        from model.loading import preload_torch

        for thread in preload_torch.start():
            thread.join()
        assert "/torch/lib/libtorch_cpu.so" in open("/proc/self/maps").read()
    """
    modules, _ = imported(script)
    assert "torch" not in modules


def test_libraries_that_are_not_there_are_left_for_torch_to_miss(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    script = """
        import importlib.util
        from model.loading import preload_torch

        sys.path.insert(0, sys.argv[1])
        assert importlib.util.find_spec("torch").origin.startswith(sys.argv[1])
        preload_torch.load_libraries()
        sys.path[:] = []
        assert importlib.util.find_spec("torch") is None
        preload_torch.load_libraries()
    """
    modules, _ = imported(script, tmp_path)
    assert "torch" not in modules


CUDA_DRIVER = r"""
    #include <stdio.h>
    static char calls[200];
    static int said = 0;
    #define SAY(...) (said += snprintf(calls + said, sizeof calls - said, __VA_ARGS__), 0)
    extern "C" {
    int cuInit(unsigned flags) { return SAY("init %u, ", flags), FAILS; }
    int cuDeviceGet(int *device, int ordinal) { *device = 7; return SAY("device %d, ", ordinal); }
    int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = 0, SAY("context of %d", device); }
    const char *what_was_called() { return calls; }
    }
"""


@pytest.mark.parametrize(
    ("built_for", "fails", "calls"),
    [("cuda", 0, "init 0, device 0, context of 7"), ("cuda", 100, "init 0, "), ("cpu", 0, "")],
)
def test_preloads_the_gpu_context(tmp_path: Path, built_for: str, fails: int, calls: str) -> None:
    """With a driver that is compiled here, for a torch that is built for GPUs."""
    driver = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["g++", "-shared", "-fPIC", f"-DFAILS={fails}", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-", "-o", driver],
        input=textwrap.dedent(CUDA_DRIVER), text=True, check=True,
    )  # fmt: skip
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "lib" / f"libtorch_{built_for}.so").touch()
    script = """
        import ctypes

        driver = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1")  # the loader finds it by this name from now on
        sys.path.insert(0, sys.argv[1])
        from model.loading import preload_torch

        for thread in preload_torch.start():
            thread.join()
        driver.what_was_called.restype = ctypes.c_char_p
        assert driver.what_was_called().decode() == sys.argv[2], driver.what_was_called()
    """
    modules, _ = imported(script, tmp_path, calls)
    assert "torch" not in modules


def test_the_collector_rests_while_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.model import Model

    found: list[bool] = []

    def load(self: Model) -> None:
        found.append(gc.isenabled())
        raise StoreError("gone")

    monkeypatch.setattr(Model, "_load", load)
    with pytest.raises(StoreError):
        Model(config={}).load()
    assert found == [False] and gc.isenabled()


def test_what_a_failed_load_held_is_free_when_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from model.model import Model

    class Held:
        pass

    held: list[weakref.ref[Held]] = []

    def load(self: Model) -> None:
        assert not [one for one in held if one() is not None], "the last load's memory"
        model, failed = Held(), Future[None]()
        held.append(weakref.ref(model))
        failed.set_exception(StoreError(f"gone {len(held)}"))  # whose traceback holds this frame, which holds it
        failed.result()

    monkeypatch.setattr(Model, "_load", load)
    model = Model(config={})
    for _ in range(2):
        with suppress(StoreError):
            model.load()
    assert len(held) == 2
    assert ["gone 1" in said for said in caplog.messages] == [
        True,
        False,
    ]  # Truss itself does not say why it tries again


def test_importing_the_server_imports_no_more_than_serving_takes() -> None:
    script = """
        import torch
        alone = set(sys.modules)
        import model.model
        import model.loading.load, model.loading.warmup
        late = set(sys.modules) - alone
        # `import torch` brings the names of torch.export along; its machinery must not follow.
        assert not [name for name in late if name.startswith(("torch.export", "torch._export", "torch.fx"))], late
    """
    modules, third_party = imported(script)
    assert not heavy(modules)
    assert third_party <= THIRD_PARTY, f"new: {third_party - THIRD_PARTY}"
    assert {"torch", "tokenizers", "pydantic", "model"} <= third_party, "the look-out itself is blind"


def test_loading_and_running_a_release_imports_nothing_heavy_either(sound: tuple[WritableLocalStore, bytes]) -> None:
    script = """
        import torch
        from model.cold_start import ColdStart
        from model.loading.load import load_release
        from model.store.store import open_store
        from model.loading.target import Target

        target = Target(*sys.argv[2:])
        loaded = load_release(open_store(sys.argv[1]), "toy/1", [target], [], ColdStart())
        y = loaded.model.engines["unet"].run({"x": torch.ones(1, 4, 8, 8)}, 64, 64)["y"]
        assert y.shape == (1, 4, 8, 8) and torch.isfinite(y).all()
    """
    target = cpu_target()
    modules, third_party = imported(
        script, sound[0].url, target.device, target.product, target.capability, target.runtime_tag
    )
    assert not heavy(modules)
    assert third_party <= THIRD_PARTY, f"new: {third_party - THIRD_PARTY}"
