"""`preheat bench latency`: measures a request with a release, and with diffusers as its peer."""

import json
import math
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from engine_builder.benchmarks import bench, comparison, peers
from engine_builder.benchmarks.peer_process import PeerFailed, peer_works
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.commands.main import app
from engine_builder.releases.signing import public_key
from model.api.request import GenerationRequest
from model.engines.engine import EngineSet
from model.errors import BrokenImage, RequestRefused, UntrustedRelease
from model.images.encode import Pixels
from model.loading.load import Loaded
from model.pipeline.spec import TEXT_ENCODER, VAE_DECODER
from model.store.store import Store
from tests.engine_builder.helpers import edit_json
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub

NAMES = ("toy-sdxl/1", "diffusers eager", "diffusers compiled")


def latency(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "toy-sdxl/1", "--store", store.url, "--warm-ups", "0", *arguments])


def test_measures_size_guidance_and_both_peers(
    toy_store: Store, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each peer runs in its own process. Compilation, which takes minutes, is switched off there."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    out = tmp_path / "rows.json"
    result = latency(
        toy_store, "--size", "128x64", "--guidance-scale", "1", "--steps", "3", "--runs", "2",
        "--peer", str(toy_folder), "--compiled", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert rows == json.loads(result.stdout.splitlines()[-1])
    assert [row["case"] for row in rows] == [f"{name} 128x64" for name in NAMES]
    assert {(row["steps"], row["runs"], row["unit"]) for row in rows} == {(3, 2, "ms")}
    assert [row.get("diffusers") for row in rows] == [None, version("diffusers"), version("diffusers")]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers with numpy 2
def test_peer_generates_the_requested_images(toy_folder: Path) -> None:
    pipeline = peers.diffusers_pipeline(Checkpoint(toy_folder), "float32", False)
    steps: list[object] = []
    pipeline.unet.register_forward_pre_hook(lambda _, inputs: steps.append(inputs[0].shape[0]))
    for guidance, batch in ((1.0, 2), (7.5, 4)):
        steps.clear()
        params = replace(PLAIN, width=128, height=64, num_inference_steps=3, num_images=2, guidance_scale=guidance)
        images = peers.generate_by_diffusers(pipeline, params)
        assert [image.shape for image in images] == [(64, 128, 3)] * 2
        assert steps == [batch] * 3


def test_reports_a_peer_that_fails_or_is_killed(toy_folder: Path) -> None:
    params = replace(PLAIN, width=100, height=64)
    with peer_works(Checkpoint(toy_folder), "float32", ("eager",), params) as [work]:
        with pytest.raises(PeerFailed, match=r"diffusers failed: ValueError: .*divisible by 8.*without --peer"):
            work()
        [process] = active_children()
        process.kill()
        with pytest.raises(PeerFailed, match="ended before it answered"):
            work()
    assert not active_children()


def test_interleaves_turns_and_drops_the_first_run_of_each() -> None:
    runs: list[str] = []

    def work_of(name: str, stage: float) -> bench.Work:
        def work() -> dict[str, float]:
            runs.append(name)
            return {"stage": stage + len(runs)}

        return work

    (ours, our_stages), (theirs, _) = bench.measure([work_of("ours", 0.0), work_of("theirs", 100.0)], 2, 6)
    turns = ["ours"] * 5 + ["theirs"] * 5 + ["ours"] * 3 + ["theirs"] * 3
    assert runs == ["ours"] * 2 + ["theirs"] * 2 + turns
    assert len(ours) == len(theirs) == 6
    assert our_stages == {"stage": 8.5}  # the 6th to 9th of all, the 16th and the 17th
    runs.clear()
    [(alone, _)] = bench.measure([work_of("ours", 0.0)], 2, 6)
    assert runs == ["ours"] * 8 and len(alone) == 6


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The shape, dtype and settings of every image that is encoded, instead of its file."""
    images: list[tuple[object, ...]] = []

    def encode(pixels: Pixels, *settings: object) -> str:
        images.append((pixels.shape, pixels.dtype.name, *settings))
        return ""

    monkeypatch.setattr(bench, "encode_base64", encode)
    return images


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers with numpy 2
def test_release_and_peer_encode_every_image(
    loaded: Loaded, toy_folder: Path, encoded: list[tuple[object, ...]]
) -> None:
    params = replace(PLAIN, width=64, height=64, num_inference_steps=1, num_images=3)
    bench.release_work(loaded, params)()
    peers.diffusers_work(peers.diffusers_pipeline(Checkpoint(toy_folder), "float32", False), params)()
    assert encoded == [((64, 64, 3), "uint8", params.output_format, params.quality)] * 2 * 3


def test_offline_time_ends_with_the_last_encoding(loaded: Loaded, encoded: list[tuple[object, ...]]) -> None:
    """On the fake clock each encoding takes a second, and nothing else takes time."""
    linear = replace(loaded, model=linear_model())
    batch = [replace(PLAIN, num_images=2)]
    totals = bench.generate_offline(linear, batch, 0, min_runs=3, clock=lambda: float(len(encoded)))
    assert len(totals) == 3 and sum(totals) == 6 * 1000


@pytest.mark.parametrize("broken_run", [0, 2])
def test_offline_raises_the_error_of_any_encoding(broken_run: int, loaded: Loaded) -> None:
    linear = replace(loaded, model=linear_model())
    stub(linear.model, VAE_DECODER).poison = (broken_run, math.nan)
    with pytest.raises(BrokenImage):
        bench.generate_offline(linear, [PLAIN], 0, min_runs=3)


def test_measures_only_named_peers(toy_store: Store) -> None:
    result = latency(toy_store, "--steps", "1", "--runs", "1")
    assert result.exit_code == 0 and len(json.loads(result.stdout.splitlines()[-1])) == 1
    refused = latency(toy_store, "--compiled")
    assert refused.exit_code == 2 and "--peer" in refused.output


def test_refuses_a_peer_that_generates_other_images(toy_store: Store, toy_folder: Path, tmp_path: Path) -> None:
    params = replace(PLAIN, scheduler="Euler")
    assert peers.find_peer(str(toy_folder), params).root == toy_folder
    for changes, field in (
        ({"use_refiner": True}, "use_refiner"),
        ({"end_cfg_frac": 0.4}, "end_cfg_frac"),
        ({"scheduler": "LCM"}, "scheduler"),
    ):
        with pytest.raises(RequestRefused) as refused:
            peers.find_peer(str(toy_folder), replace(params, **changes))  # type: ignore[arg-type]
        assert refused.value.field == field
    assert peers.find_peer(str(toy_folder), replace(params, end_cfg_frac=0.4, guidance_scale=1.0)).root == toy_folder
    for path, message in ((tmp_path / "none", "is neither a folder nor"), (tmp_path, "has no model_index.json")):
        result = latency(toy_store, "--steps", "1", "--runs", "1", "--peer", str(path))
        assert isinstance(result.exception, CheckpointError) and message in str(result.exception)


def test_peer_reads_variant_weights_as_a_build_does(folder_copy: Path) -> None:
    for path in folder_copy.glob("*/*.safetensors"):
        path.rename(path.with_name(f"{path.stem}.fp16.safetensors"))
    assert peers.diffusers_pipeline(Checkpoint(folder_copy), "float32", False).unet.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers with numpy 2
def test_compiled_decoder_with_force_upcast_stays_in_fp32(folder_copy: Path) -> None:
    """diffusers would convert it for each image, which moves its memory: CUDA graphs need fixed addresses."""
    edit_json(folder_copy / "vae" / "config.json", force_upcast=True)
    with torch.compiler.set_stance("force_eager"):  # compilation takes minutes
        pipeline = peers.diffusers_pipeline(Checkpoint(folder_copy), "float16", True)
        addresses = [tensor.data_ptr() for tensor in pipeline.vae.parameters()]
        for _ in range(2):
            peers.generate_by_diffusers(pipeline, replace(PLAIN, width=64, num_inference_steps=1))
    assert [tensor.data_ptr() for tensor in pipeline.vae.parameters()] == addresses
    assert (pipeline.vae.dtype, pipeline.unet.dtype) == (torch.float32, torch.float16)


def test_reports_a_gpu_without_memory_for_the_peers(loaded: Loaded, toy_folder: Path) -> None:
    encoder = Stub(TEXT_ENCODER, loaded.model.engines[TEXT_ENCODER].signature)
    encoder.fails = torch.OutOfMemoryError("CUDA out of memory")
    engines = {**loaded.model.engines, TEXT_ENCODER: EngineSet([encoder])}
    full = replace(loaded, model=replace(loaded.model, engines=engines))
    request = GenerationRequest(prompt="a circle", width=64, height=64, num_inference_steps=1)
    with pytest.raises(PeerFailed, match="without --compiled"):
        comparison.bench_against_diffusers(full, request, str(toy_folder), (), 0, 1)


def test_checks_the_signature_first(toy_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_PUBLIC_KEY", str(public_key(Ed25519PrivateKey.generate())))
    with pytest.raises(UntrustedRelease):
        bench.load_in_process(toy_store.url, "toy-sdxl/1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "toy-sdxl/1", "--runs", "0"),
        ("bench", "cold-start", "toy-sdxl/1", "--runs", "0"),
        ("bench", "cold-start", "toy-sdxl/1", "--config", "nowhere.yaml"),
        ("serve", "toy-sdxl/1", "--config", "nowhere.yaml"),
        ("serve", "toy-sdxl/1", "--port", "99999"),
        ("load", "toy-sdxl/1", "--clients", "1,x"),
        ("load", "toy-sdxl/1", "--clients", "0"),
        ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start", "-10"),
        ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start", "1", "--steps", "0"),
        ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start", "1", "--max-replica", "0"),
        ("report", "nowhere"),
    ],
    ids=" ".join,
)
def test_refuses_invalid_options_at_once(arguments: tuple[str, ...], toy_store: Store) -> None:
    store = [] if arguments[0] in ("plan-replicas", "report") else ["--store", toy_store.url]
    result = CliRunner().invoke(app, [*arguments, *store])
    assert result.exit_code == 2 and "Usage:" in result.output


@pytest.mark.parametrize("size, message", [("128", "WIDTHxHEIGHT"), ("101x64", "101")])
def test_refuses_an_invalid_size(size: str, message: str, toy_store: Store) -> None:
    result = latency(toy_store, "--size", size, "--runs", "1")
    assert result.exit_code != 0 and message in result.output + str(result.exception)


@pytest.mark.parametrize("option, field", [("--guidance-scale", "guidance_scale"), ("--steps", "num_inference_steps")])
def test_refuses_invalid_requests_before_loading(option: str, field: str) -> None:
    result = CliRunner().invoke(app, ["bench", "no-such/1", option, "999"])
    assert isinstance(result.exception, RequestRefused) and result.exception.field == field
    assert "got 999" in str(result.exception)
