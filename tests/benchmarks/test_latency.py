"""Latency in one process: `preheat bench latency`, diffusers as its peer, and the cases of docs/benchmarks.md."""

import json
import math
import shutil
import time
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from benchmarks import adapters, latency, measure, peers
from benchmarks.latency import Case, compare, measure_cases
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.releases.signing import public_key
from model.engines.engine import EngineSet
from model.errors import BrokenImage, RequestRefused, UntrustedRelease
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.served import ServedIpAdapter, SizeList
from model.pipeline.components import FAMILIES
from model.pipeline.params import GenerationParams
from model.pipeline.spec import TEXT_ENCODER, VAE_DECODER
from model.request_fields import GenerationRequest
from model.store.store import Store
from preheat.main import app
from tests.engine_builder.helpers import edit_json
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers with numpy 2


def bench(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "toy-sdxl/1", "--store", store.url, "--warm-ups", "0", *arguments])


# -- the command and its peers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), pytest.param(("--compiled",), marks=pytest.mark.full)])
def test_measures_size_guidance_and_peers(
    options: tuple[str, ...], toy_store: Store, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each peer runs in its own process. Compilation, which takes minutes, is switched off there."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    out = tmp_path / "rows.json"
    result = bench(
        toy_store, "--size", "128x64", "--guidance-scale", "1", "--steps", "3", "--runs", "2",
        "--peer", str(toy_folder), *options, "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert rows == json.loads(result.stdout.splitlines()[-1])
    names = ["toy-sdxl/1", "diffusers eager", "diffusers compiled"][: 2 + len(options)]
    assert [row["case"] for row in rows] == [f"{name} 128x64" for name in names]
    assert {(row["steps"], row["runs"], row["unit"]) for row in rows} == {(3, 2, "ms")}
    assert [row.get("diffusers") for row in rows] == [None, *[version("diffusers")] * (1 + len(options))]


def test_measures_only_named_peers(toy_store: Store) -> None:
    result = bench(toy_store, "--steps", "1", "--runs", "1")
    assert result.exit_code == 0 and len(json.loads(result.stdout.splitlines()[-1])) == 1
    refused = bench(toy_store, "--compiled")
    assert refused.exit_code == 2 and "--peer" in refused.output


def test_peer_generates_and_encodes_the_requested_images(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[tuple[int, ...]] = []
    monkeypatch.setattr(measure, "encode_base64", lambda pixels, *_: encoded.append(pixels.shape))
    folder = Checkpoint(toy_folder)
    pipeline = peers.diffusers_pipeline(folder, "float32", False)
    steps: list[object] = []
    pipeline.unet.register_forward_pre_hook(lambda _, inputs: steps.append(inputs[0].shape[0]))
    for guidance, batch in ((1.0, 2), (7.5, 4)):
        steps.clear()
        params = replace(PLAIN, width=128, height=64, num_inference_steps=3, num_images=2, guidance_scale=guidance)
        peers.generate_by_diffusers(pipeline, folder, params)
        assert steps == [batch] * 3
    assert encoded == [(64, 128, 3)] * 4


class RecordDraws(TorchFunctionMode):
    """Records the dtype of each call of torch.randn."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(self, function: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.randn:
            self.dtypes.append(options["dtype"])
        return function(*arguments, **(options or {}))


def test_peer_draws_the_noise_of_a_seed_in_fp32(toy_folder: Path) -> None:
    """In fp16 torch 2.11 draws unrelated numbers from the same seed."""
    folder, params = Checkpoint(toy_folder), replace(PLAIN, width=64, height=64, num_inference_steps=2)
    pipeline = peers.diffusers_pipeline(folder, "float16", False)
    with RecordDraws() as draws:
        peers.generate_by_diffusers(pipeline, folder, replace(params, scheduler="Euler a"))
    assert draws.dtypes == [torch.float32] * 3  # the initial latents, and one of each step


def test_reports_a_peer_that_fails_or_is_killed(toy_folder: Path) -> None:
    params = replace(PLAIN, width=100, height=64)
    with peers.start_peers(Checkpoint(toy_folder), "float32", ("eager",)) as [peer]:
        with pytest.raises(peers.PeerFailed, match=r"diffusers failed: ValueError: .*divisible by 8.*without --peer"):
            peer.generate(params)
        [process] = active_children()
        process.kill()
        with pytest.raises(peers.PeerFailed, match="ended before it answered"):
            peer.work(params)()
    assert not active_children()


def test_refuses_a_peer_that_generates_other_images(toy_store: Store, toy_folder: Path, tmp_path: Path) -> None:
    params = replace(PLAIN, scheduler="Euler")
    assert peers.find_peer(str(toy_folder), params).root == toy_folder
    for changes, field in (
        ({"use_refiner": True}, "use_refiner"),
        ({"guidance_end": 0.4}, "guidance_end"),
        ({"guidance_start": 0.4}, "guidance_end"),
        ({"forecast": "fast"}, "forecast"),
        ({"clip_skip": 1}, "clip_skip"),
    ):
        with pytest.raises(RequestRefused) as refused:
            peers.find_peer(str(toy_folder), replace(params, **changes))  # type: ignore[arg-type]
        assert refused.value.field == field
    assert peers.find_peer(str(toy_folder), replace(params, guidance_end=0.4, guidance_scale=1.0)).root == toy_folder
    for path, message in ((tmp_path / "none", "is neither a folder nor"), (tmp_path, "has no model_index.json")):
        result = bench(toy_store, "--steps", "1", "--runs", "1", "--peer", str(path))
        assert isinstance(result.exception, CheckpointError) and message in str(result.exception)


def test_compiled_decoder_with_force_upcast_stays_in_fp32(toy_folder: Path, tmp_path: Path) -> None:
    """diffusers would convert it for each image, which moves its memory: CUDA graphs need fixed addresses.

    The weights are of a variant, which a build reads as well.
    """
    folder = Path(shutil.copytree(toy_folder, tmp_path / "copy"))
    for path in folder.glob("*/*.safetensors"):
        path.rename(path.with_name(f"{path.stem}.fp16.safetensors"))
    edit_json(folder / "vae" / "config.json", force_upcast=True)
    with torch.compiler.set_stance("force_eager"):  # compilation takes minutes
        pipeline = peers.diffusers_pipeline(Checkpoint(folder), "float16", True)
        addresses = [tensor.data_ptr() for tensor in pipeline.vae.parameters()]
        for _ in range(2):
            peers.generate_by_diffusers(pipeline, Checkpoint(folder), replace(PLAIN, width=64, num_inference_steps=1))
    assert [tensor.data_ptr() for tensor in pipeline.vae.parameters()] == addresses
    assert (pipeline.vae.dtype, pipeline.unet.dtype) == (torch.float32, torch.float16)


def test_reports_a_gpu_without_memory_for_the_peers(loaded: Loaded, toy_folder: Path) -> None:
    encoder = Stub(TEXT_ENCODER, loaded.model.engines[TEXT_ENCODER].signature)
    encoder.fails = torch.OutOfMemoryError("CUDA out of memory")
    engines = {**loaded.model.engines, TEXT_ENCODER: EngineSet([encoder])}
    full = replace(loaded, model=replace(loaded.model, engines=engines))
    request = GenerationRequest(prompt="a circle", width=64, height=64, num_inference_steps=1)
    with pytest.raises(peers.PeerFailed, match="without --compiled"):
        peers.bench_against_diffusers(full, request, str(toy_folder), (), 0, 1)


def test_checks_the_signature_first(toy_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_PUBLIC_KEY", str(public_key(Ed25519PrivateKey.generate())))
    with pytest.raises(UntrustedRelease):
        measure.load_in_process(toy_store.url, "toy-sdxl/1")


def test_refuses_invalid_options_at_once(toy_store: Store) -> None:
    plan = ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start")
    store = ("--store", toy_store.url)
    for arguments in (
        ("bench", "toy-sdxl/1", "--runs", "0", *store),
        ("bench", "toy-sdxl/1", "--size", "128", *store),
        ("bench", "cold-start", "toy-sdxl/1", "--runs", "0", *store),
        ("bench", "cold-start", "toy-sdxl/1", "--config", "nowhere.yaml", *store),
        ("bench", "cold-start", "toy-sdxl/1", "--s3", "folder", *store),
        ("bench", "cold-start", "toy-sdxl/1", "--size", "1024", *store),
        ("bench", "cold-start", "toy-sdxl/1", "--bucket", "1024x1024@two", *store),
        ("serve", "toy-sdxl/1", "--config", "nowhere.yaml", *store),
        ("serve", "toy-sdxl/1", "--port", "99999", *store),
        ("load", "toy-sdxl/1", "--clients", "1,x", *store),
        ("load", "toy-sdxl/1", "--clients", "0", *store),
        (*plan, "-10"),
        (*plan, "1", "--steps", "0"),
        (*plan, "1", "--max-replica", "0"),
        ("report", "nowhere"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "Usage:" in result.output, arguments


def test_refuses_invalid_requests_before_loading(toy_store: Store) -> None:
    for option, field in (("--guidance-scale", "guidance_scale"), ("--steps", "num_inference_steps")):
        result = CliRunner().invoke(app, ["bench", "no-such/1", option, "999"])
        assert isinstance(result.exception, RequestRefused) and result.exception.field == field
        assert "got 999" in str(result.exception)
    unserved = bench(toy_store, "--size", "101x64", "--runs", "1")
    assert isinstance(unserved.exception, RequestRefused) and "101" in str(unserved.exception)


# -- what is measured ------------------------------------------------------------------------------------------------


def test_interleaves_turns_and_drops_the_first_run_of_each() -> None:
    runs: list[str] = []

    def work_of(name: str, stage: float) -> measure.Work:
        def work() -> dict[str, float]:
            runs.append(name)
            return {"stage": stage + len(runs)}

        return work

    (ours, our_stages), (theirs, _) = measure.measure([work_of("ours", 0.0), work_of("theirs", 100.0)], 2, 6)
    turns = ["ours"] * 5 + ["theirs"] * 5 + ["ours"] * 3 + ["theirs"] * 3
    assert runs == ["ours"] * 2 + ["theirs"] * 2 + turns
    assert len(ours) == len(theirs) == 6
    assert our_stages == {"stage": 8.5}  # the 6th to 9th of all, the 16th and the 17th


def test_offline_time_ends_with_the_last_encoding(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake clock each encoding takes a second, and nothing else takes time."""
    encoded: list[Pixels] = []
    monkeypatch.setattr(measure, "encode_base64", lambda pixels, *_: encoded.append(pixels))
    linear = replace(loaded, model=linear_model())
    batch = [replace(PLAIN, num_images=2)]
    totals = measure.generate_offline(linear, batch, 0, min_runs=3, clock=lambda: float(len(encoded)))
    assert len(totals) == 3 and sum(totals) == 6 * 1000
    broken = replace(loaded, model=linear_model())
    stub(broken.model, VAE_DECODER).poison = (2, math.nan)
    with pytest.raises(BrokenImage):
        measure.generate_offline(broken, [PLAIN], 0, min_runs=3)


def test_one_row_per_served_case(
    loaded: Loaded, toy_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = (
        Case("first", 2, 2, side=64),
        Case("many", 3, 2, images=2, side=64, throughput=True),
        Case("too-large", 2, 2, side=4096),
    )
    with pytest.raises(CheckpointError):
        list(measure_cases([loaded], "no such folder", cases))
    assert capsys.readouterr().out == "", "the peer is looked for before anything is measured"
    rows = list(measure_cases([loaded], cases=cases))
    assert [(row.case, row.unit, row.runs, row.steps, row.batch) for row in rows] == [
        ("first", "ms", 2, 2, 1),
        ("many", "images/s", 3, 2, 2),
    ]
    assert rows[1].p50 >= rows[1].p99
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["first", "many", "too-large"]
    assert "skipped" in lines[2] and "4096" in lines[2]
    monkeypatch.setattr(latency, "bench_against_diffusers", lambda *_: [rows[0]] * 3)
    assert [row.case for row in measure_cases([loaded], str(toy_folder), cases[:1])] == [
        "first", "first, in turns with diffusers", "first, diffusers eager", "first, diffusers compiled",
    ]  # fmt: skip


def test_cases_are_those_of_the_family(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    sdxl = linear_model()
    sd = replace(sdxl, family=FAMILIES["sd"])
    for model, cases in ((sdxl, latency.CASES), (sd, latency.SD_CASES)):
        no_size = replace(loaded, model=model, served=replace(loaded.served, sizes=SizeList(())))
        assert not list(measure_cases([no_size]))
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0] for line in lines] == [case.name for case in cases]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("images", ["inpaint", "image to image"]),
        ("controls", ["with edges", "with all"]),
        ("image-prompts", ["with style, 1 image", "with style, 2 images"]),
    ],
)
def test_compares_requests_with_a_plain_one(
    kind: str, expected: list[str], loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's time is the difference of two requests: here 2 ms, and with an input 3 ms. The rest takes 50 ms."""

    def fake_work(loaded: Loaded, params: GenerationParams):  # type: ignore[no-untyped-def]
        levels = [one.levels for one in (*params.controls, *params.image_prompts, *params.masks)]
        assert all(np.ptp(one) for one in levels)
        given = bool(levels) or params.image is not None
        seen.append((given, params.num_inference_steps, params.strength))

        def work() -> dict[str, float]:
            time.sleep(0.002)  # a request takes some time, to which the others are compared
            return {"denoise": 50.0 + (3.0 if given else 2.0) * params.num_inference_steps}

        return work

    seen: list[tuple[bool, int, float]] = []
    monkeypatch.setattr(measure, "release_work", fake_work)
    style = ServedIpAdapter(images=2, side=16)
    served = replace(loaded.served, controlnets={"edges": 0, "all": 3}, ip_adapters={"style": style})
    rows, ratios = compare(replace(loaded, served=served), kind, steps=6, runs=2, warm_ups=0, side=64)
    strengths = [0.5 if name == "image to image" else 1.0 for name in expected for _ in range(2)]
    assert seen == [(False, 6, 1.0), (False, 2, 1.0)] + [
        (True, steps, strength) for steps, strength in zip([6, 2] * 2, strengths, strict=True)
    ]
    assert [row.case for row in rows[::2]] == [
        f"{loaded.release} {name} 64x64" for name in ["text to image", *expected]
    ]
    assert {name: numbers["step"] for name, numbers in ratios.items()} == dict.fromkeys(expected, 1.5)


def test_refuses_what_cannot_be_compared(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="5 steps are too few to compare; 6 are needed"):
        compare(loaded, "images", steps=5, runs=1)
    without = replace(loaded, served=replace(loaded.served, image_sizes=None))
    messages = {"images": "no VAE encoder", "controls": "no ControlNets", "image-prompts": "no IP-Adapters"}
    for kind, message in messages.items():
        with pytest.raises(RequestRefused, match=f"has {message}"):
            compare(without, kind, steps=6, runs=1)


def test_commands_measure_a_release(store: Store, release: str, tmp_path: Path) -> None:
    """Real requests with an input image, and swaps of random adapters. The store is not changed."""
    out = tmp_path / "rows.json"
    latency.main(["images", store.url, release, "--steps", "6", "--runs", "1", "--side", "64", "--out", str(out)])
    assert len(json.loads(out.read_text())) == 6
    adapters.main([store.url, release, "--rank", "2", "--runs", "1", "--images", "1", "--out", str(out)])
    swaps = [row["case"].partition(": ")[2] for row in json.loads(out.read_text())[6:]]
    swapped = ["swap", "exchange", "restore", "three", "restore from three", "lora", "dora", "lokr", "restore from all"]
    assert swaps == [*swapped, "read"]
    assert store.adapters() == {}
