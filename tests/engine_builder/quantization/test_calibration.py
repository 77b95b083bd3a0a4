"""Calibration: the ranges of layers, their records in a store, resuming, and refusals."""

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.calibrate import PROMPTS
from engine_builder.commands.main import app
from engine_builder.networks.network import load_network
from engine_builder.quantization.calibrate import CalibrationPlan, calibrate, digest_weights, observing, read_prompts
from engine_builder.quantization.ranges import BINS, InputRange, bin_edges, bins_of, to_e4m3
from engine_builder.quantization.record import (
    CalibrationError,
    CalibrationRecord,
    Conditions,
    check_ranges,
    find_calibration,
    read_calibration,
    write_calibration,
)
from engine_builder.releases.gc import named_blobs
from engine_builder.stores.store import WritableStore, open_writable_store
from engine_builder.stores.writing import record_key
from model.store.precision import FP32
from model.weights.fp8 import E4M3_MAX
from tests.engine_builder.helpers import edit_weights, folder_of, perturb
from tests.support.repository import REPOSITORY

CPU = torch.device("cpu")
CONDITIONS = Conditions("unet", "a" * 64, "b" * 64, 2, 3, False, 8.0, 64, 64, "fp32")


def observed(*inputs: torch.Tensor, axis: int = -1) -> InputRange:
    found = InputRange.empty(inputs[0].shape[axis], CPU)
    for values in inputs:
        found.observe(values, axis)
    return found


# -- ranges ----------------------------------------------------------------------------------------------------------


def test_counts_every_value_of_small_inputs_and_the_maximum_of_each_channel() -> None:
    found = observed(torch.tensor([[1.0, -3.0], [0.5, 2.0]]), torch.tensor([[0.0, 4.0]]))
    assert found.channel_maxima.tolist() == [1.0, 4.0] and found.absolute_maximum == 4.0
    assert int(found.counts.sum()) == 6 and int(found.counts[0]) == 1, "zero is in the lowest bin"
    assert found.calls == 2


def test_channels_of_a_convolution_are_the_second_axis() -> None:
    image = torch.zeros(2, 3, 4, 4)
    image[1, 2, 3, 3] = -7
    assert observed(image, axis=1).channel_maxima.tolist() == [0.0, 0.0, 7.0]


def test_large_inputs_are_sampled_and_their_maximum_is_exact() -> None:
    values = torch.ones(2**20, 2)
    values[12345, 1] = 9
    found = observed(values)
    assert found.absolute_maximum == 9 and 2**17 < int(found.counts.sum()) < 2**20


@pytest.mark.parametrize(("tokens", "channels"), [(8192, 640), (2048, 1280), (8192, 2560), (2048, 5120)])
def test_sampled_values_are_of_every_channel(tokens: int, channels: int) -> None:
    values = torch.arange(1, channels + 1).log2().repeat(tokens, 1)  # a channel's values share a bin
    found = observed(values)
    bins = set(bins_of(values[0]).tolist())
    assert bins == set(found.counts.nonzero().flatten().tolist())


@pytest.mark.parametrize("value", [1e-9, 2.0**-24, 1.0, 3.7, 448.0, 65504.0, 1e9])
def test_value_lies_between_the_edges_of_its_bin(value: float) -> None:
    [index] = bins_of(torch.tensor([value])).tolist()
    edges = bin_edges()
    assert len(edges) == BINS + 1
    assert (index == 0 or edges[index] <= value * (1 + 1e-6)) and (index == BINS - 1 or value < edges[index + 1])


def test_percentile_bounds_the_share_of_values() -> None:
    values = torch.randn(50_000, 2, generator=torch.Generator().manual_seed(0))
    found = observed(values)
    for share in (0.5, 0.99, 0.9999):
        clip = found.percentile(share)
        exact = float(values.abs().flatten().quantile(share))
        assert exact <= clip <= exact * 2 ** (1 / 16) * 1.001
    assert found.percentile(1.0) == found.absolute_maximum


def test_least_error_clips_outliers_only_if_that_pays() -> None:
    """E4M3 has 17 octaves: an outlier costs the other values nothing until they become subnormal."""
    values = torch.randn(100_000, 1, generator=torch.Generator().manual_seed(0))
    uniform = observed(values)
    assert uniform.clip("squared_error") >= 0.9 * uniform.absolute_maximum
    for rule in ("absolute_maximum", "percentile", "squared_error"):
        clip = uniform.clip(rule)  # type: ignore[arg-type]
        errors = (to_e4m3(values.abs().double(), clip) - values.abs().double()).norm() / values.norm()
        assert errors < 0.04, rule


def test_e4m3_maps_the_clip_to_its_largest_number() -> None:
    assert to_e4m3(torch.tensor([2.0, 5.0], dtype=torch.float64), 2.0).tolist() == [2.0, 2.0]
    assert to_e4m3(torch.tensor([2.0 / E4M3_MAX * 2**-10], dtype=torch.float64), 2.0).tolist() == [0.0]


def test_observes_inputs_of_linears_and_convolutions_by_the_names_of_their_weights(toy_folder: Path) -> None:
    network = load_network(Checkpoint(toy_folder), "unet", FP32, plain=True)
    layers = {
        name
        for name, m in network.module.named_modules()
        if isinstance(m, nn.Linear | nn.Conv2d) and m.weight is not None
    }
    ranges: dict[str, InputRange] = {}
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 4, 8, 8, generator=generator)]
    for spec in network.signature.inputs[1:]:
        inputs.append(torch.randn([1, *(int(size) for size in spec.shape[1:])], generator=generator))
    with observing(network.module, ranges), torch.inference_mode():
        network.module(*inputs)
    assert len(ranges) == len(layers) > 20
    assert {f"{name}.weight" for name in ranges} <= network.tensors().keys()
    with torch.inference_mode():
        network.module(*inputs)
    assert all(found.calls == 1 for found in ranges.values()), "hooks stay after the calibration"


# -- a calibration ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(toy_folder: Path) -> CalibrationPlan:
    return CalibrationPlan(
        Checkpoint(toy_folder), None, FP32, "cpu", ("a circle", "a square", "a line"), "", steps=2, guidance=4.0,
        width=64, height=64,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> WritableStore:
    return open_writable_store(tmp_path / "store")


def test_calibrates_once(plan: CalibrationPlan, store: WritableStore, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    first, decoder = calibrate(plan, store, tmp_path / "partial", lambda *progress: reports.append(progress))
    assert first.is_new and reports == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert {found.calls for found in first.ranges.values()} == {6}, "three prompts of two guided steps"
    assert decoder.conditions.component == "vae_decoder" and "decoder.conv_in" in decoder.ranges
    assert {found.calls for found in decoder.ranges.values()} == {3}
    assert list((tmp_path / "partial").iterdir()) == []
    reports.clear()
    again, _ = calibrate(plan, store, tmp_path / "partial", lambda *progress: reports.append(progress))
    assert not again.is_new and reports == []
    assert again.ranges.keys() == first.ranges.keys()
    for name, found in again.ranges.items():
        assert torch.equal(found.counts, first.ranges[name].counts) and found.calls == 6
    record = CalibrationRecord.find(store, first.conditions.key)
    assert record is not None and record.ranges.sha256 in named_blobs(store), "gc would delete the ranges"


def test_stored_ranges_stay_if_another_networks_are_missing(
    plan: CalibrationPlan, store: WritableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another VAE, or after a version that calibrated only UNets: validations name the UNet's record."""
    unet, decoder = calibrate(plan, store, tmp_path / "partial")
    kept, missing = (
        Path(folder_of(store)) / record_key(CalibrationRecord.kind, network.conditions.key)
        for network in (unet, decoder)
    )
    missing.unlink()
    os.utime(kept, (0, 0))
    observed: list[nn.Module] = []

    def observe(network: nn.Module, ranges: dict[str, InputRange]) -> AbstractContextManager[None]:
        observed.append(network)
        return observing(network, ranges)

    monkeypatch.setattr("engine_builder.quantization.calibrate.observing", observe)
    again = calibrate(plan, store, tmp_path / "partial")
    assert [type(network).__name__ for network in observed] == ["VaeDecoderNetwork"]
    assert [network.is_new for network in again] == [False, True]
    assert [network.conditions for network in again] == [unet.conditions, decoder.conditions]
    assert kept.stat().st_mtime == 0 and missing.exists()


def test_base_runs_all_steps_of_half_of_the_prompts(store: WritableStore, tmp_path: Path) -> None:
    """Requests without a refiner do so too. The first prompt runs both ways, the second with the refiner."""
    folder = REPOSITORY / "data" / "tiny-sdxl"
    prompts = ("a circle", "a square", "a line")
    plan = CalibrationPlan(
        Checkpoint(folder), Checkpoint(folder / "refiner"), FP32, "cpu", prompts, "", steps=5, guidance=4.0, width=64,
        height=64,
    )  # fmt: skip
    calls = {
        network.conditions.component: {found.calls for found in network.ranges.values()}
        for network in calibrate(plan, store, tmp_path / "partial")
    }
    assert calls == {"unet": {(5 + 4) + 4 + 5}, "refiner_unet": {1 + 1}, "vae_decoder": {2 + 1 + 1}}


def test_interrupted_calibration_continues(plan: CalibrationPlan, store: WritableStore, tmp_path: Path) -> None:
    def interrupt(done: int, prompts: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan, store, tmp_path / "partial", interrupt)
    assert store.records("calibrations") == []
    reports: list[int] = []
    resumed, _ = calibrate(plan, store, tmp_path / "partial", lambda done, prompts: reports.append(done))
    assert reports == [2, 3]
    other = open_writable_store(tmp_path / "other")
    whole, _ = calibrate(plan, other, tmp_path / "elsewhere")
    for name, found in whole.ranges.items():
        assert torch.equal(found.counts, resumed.ranges[name].counts), name
        assert torch.equal(found.channel_maxima, resumed.ranges[name].channel_maxima), name


def test_damaged_partial_file_starts_again(plan: CalibrationPlan, store: WritableStore, tmp_path: Path) -> None:
    def interrupt(done: int, prompts: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan, store, tmp_path / "partial", interrupt)
    [saved] = (tmp_path / "partial").iterdir()
    saved.write_bytes(saved.read_bytes()[:1000])
    reports: list[int] = []
    calibrate(plan, store, tmp_path / "partial", lambda done, prompts: reports.append(done))
    assert reports == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [{"prompts": ("a circle",)}, {"negative_prompt": "blur"}, {"steps": 3}, {"guidance": 5.0}, {"width": 128}],
    ids=lambda change: next(iter(change)),
)
def test_other_conditions_have_another_key(plan: CalibrationPlan, change: dict[str, object]) -> None:
    changed = dataclasses.replace(plan, **change)  # type: ignore[arg-type]
    assert changed.conditions("unet").key != plan.conditions("unet").key


def test_other_weights_have_another_key(plan: CalibrationPlan, folder_copy: Path) -> None:
    assert digest_weights(Checkpoint(folder_copy), "unet") == digest_weights(plan.base, "unet")
    edit_weights(folder_copy / "unet", perturb)
    assert digest_weights(Checkpoint(folder_copy), "unet") != digest_weights(plan.base, "unet")


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.tensor([[1.0, float("nan")]]), "held NaN or infinity"),
        (torch.tensor([[1.0, float("inf")]]), "held NaN or infinity"),
        (torch.zeros(2, 2), "was always zero"),
    ],
    ids=["NaN", "infinity", "zeros"],
)
def test_refuses_ranges_that_give_no_scale(values: torch.Tensor, words: str, store: WritableStore) -> None:
    ranges = {"conv_in": observed(torch.ones(1, 2)), "proj": observed(values)}
    with pytest.raises(CalibrationError, match=f"unet's layer proj {words}"):
        write_calibration(store, CONDITIONS, ranges)
    assert store.records("calibrations") == []


def test_refuses_a_calibration_without_layers() -> None:
    with pytest.raises(CalibrationError, match="has no layers"):
        check_ranges("unet", {})


def test_refuses_a_record_of_other_weights(store: WritableStore) -> None:
    write_calibration(store, CONDITIONS, {"proj": observed(torch.ones(1, 2))})
    assert read_calibration(store, CONDITIONS.key, "a" * 64)["proj"].absolute_maximum == 1
    with pytest.raises(CalibrationError, match=r"of other weights of unet than this model's.*preheat calibrate"):
        read_calibration(store, CONDITIONS.key, "c" * 64)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, delete])
def test_refuses_a_damaged_record(damage: Callable[[Path], None], store: WritableStore) -> None:
    write_calibration(store, CONDITIONS, {"proj": observed(torch.ones(1, 2))})
    record = CalibrationRecord.find(store, CONDITIONS.key)
    assert record is not None
    damage(folder_of(store) / "blobs" / "sha256" / record.ranges.sha256)
    with pytest.raises(CalibrationError, match=r"no intact calibration record.*preheat calibrate"):
        read_calibration(store, CONDITIONS.key, "a" * 64)


def test_record_of_an_older_version_is_not_found(store: WritableStore) -> None:
    write_calibration(store, CONDITIONS, {"proj": observed(torch.ones(1, 2))})
    assert find_calibration(store, "unet", "a" * 64)[0] == CONDITIONS.key
    record = CalibrationRecord.find(store, CONDITIONS.key)
    assert record is not None
    record.model_copy(update={"version": 1}).write(store, CONDITIONS.key)
    with pytest.raises(CalibrationError, match="no intact calibration of this model's unet"):
        find_calibration(store, "unet", "a" * 64)


def test_unusable_ranges_end_a_calibration_after_its_first_image(
    plan: CalibrationPlan, store: WritableStore, tmp_path: Path, folder_copy: Path
) -> None:
    def zero_input(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".norm1." in name and "transformer_blocks" in name:
                tensor.zero_()

    edit_weights(folder_copy / "unet", zero_input)
    reports: list[int] = []
    changed = dataclasses.replace(plan, base=Checkpoint(folder_copy))
    with pytest.raises(CalibrationError, match="was always zero"):
        calibrate(changed, store, tmp_path / "partial", lambda done, prompts: reports.append(done))
    assert reports == [0] and not list((tmp_path / "partial").glob("*"))


def test_refuses_a_record_whose_blob_holds_something_else(store: WritableStore) -> None:
    from safetensors.torch import save

    from engine_builder.backends.built import put_blob

    write_calibration(store, CONDITIONS, {"proj": observed(torch.ones(1, 2))})
    record = CalibrationRecord.find(store, CONDITIONS.key)
    assert record is not None
    for data in (save({"proj.counts": torch.zeros(3)}), save({"proj.counts": torch.zeros(BINS).long()}), b"text"):
        record.model_copy(update={"ranges": put_blob(store, data)}).write(store, CONDITIONS.key)
        with pytest.raises(CalibrationError, match="of unet is damaged"):
            read_calibration(store, CONDITIONS.key, "a" * 64)


# -- the command -----------------------------------------------------------------------------------------------------


def test_command_lists_layers_and_reuses_the_record(toy_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# two\n\na circle\n  a square  \n")
    arguments = ["calibrate", str(toy_folder), "--prompts", str(prompts), "--steps", "2", "--size", "64x64",
                 "--store", str(tmp_path / "store")]  # fmt: skip
    first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert first.exit_code == 0 and "unet calibrated: " in first.output and "2 prompts" in first.output
    assert "largest outliers" in first.output
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "unet reused: " in again.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"# none\n\n", "holds no prompt"),
        (b"\xff", "cannot be read"),
        (b"a" * 4001, "is no prompt: at most 4000 characters"),
        (b"a\0b", "without NUL"),
    ],
)
def test_command_refuses_a_file_without_prompts(
    content: bytes | None, words: str, toy_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(app, ["calibrate", str(toy_folder), "--prompts", str(file)])
    assert result.exception is not None and words in str(result.exception)


@pytest.mark.parametrize("file", sorted((REPOSITORY / "data" / "prompts").glob("*.txt")), ids=lambda path: path.name)
def test_shipped_prompts_are_128_different_ones(file: Path) -> None:
    prompts = read_prompts(file.read_text())
    assert len(prompts) == len(set(prompts)) == 128
    assert PROMPTS.is_file()
