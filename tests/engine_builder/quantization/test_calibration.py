"""Calibration: the ranges of layers, their records in a store, resuming, and refusals."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from engine_builder.backends.built import put_blob
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_network
from engine_builder.quantization.calibrate import CalibrationPlan, calibrate, digest_weights, observing, read_prompts
from engine_builder.quantization.ranges import BINS, InputRange, bins_of, to_e4m3
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
from preheat.commands.calibrate import PROMPTS
from tests.engine_builder.helpers import edit_weights, folder_of, perturb
from tests.support.quantization import observed, run, unet_inputs
from tests.support.repository import MODEL_FOLDER, REPOSITORY

CONDITIONS = Conditions("unet", "a" * 64, "b" * 64, 2, 3, False, 8.0, 64, 64, "fp32")

# -- ranges ----------------------------------------------------------------------------------------------------------


def test_counts_every_value_of_small_inputs_and_the_maximum_of_each_channel() -> None:
    """The channels of a convolution are the second axis."""
    found = observed(torch.tensor([[1.0, -3.0], [0.5, 2.0]]), torch.tensor([[0.0, 4.0]]))
    assert found.channel_maxima.tolist() == [1.0, 4.0] and found.absolute_maximum == 4.0
    assert int(found.counts.sum()) == 6 and int(found.counts[0]) == 1, "zero is in the lowest bin"
    assert found.calls == 2
    image = torch.zeros(2, 3, 4, 4)
    image[1, 2, 3, 3] = -7
    assert observed(image, axis=1).channel_maxima.tolist() == [0.0, 0.0, 7.0]


def test_large_inputs_are_sampled_in_every_channel_and_their_maximum_is_exact() -> None:
    values = torch.ones(2**20, 2)
    values[12345, 1] = 9
    found = observed(values)
    assert found.absolute_maximum == 9 and 2**17 < int(found.counts.sum()) < 2**20
    for tokens, channels in ((8192, 640), (2048, 1280), (2048, 5120)):
        values = torch.arange(1, channels + 1).log2().repeat(tokens, 1)  # a channel's values share a bin
        bins = set(bins_of(values[0]).tolist())
        assert bins == set(observed(values).counts.nonzero().flatten().tolist()), channels


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
    smallest = 2.0 / E4M3_MAX * 2**-10
    assert to_e4m3(torch.tensor([2.0, 5.0, smallest], dtype=torch.float64), 2.0).tolist() == [2.0, 2.0, 0.0]


def test_observes_inputs_of_linears_and_convolutions_by_the_names_of_their_weights(toy_folder: Path) -> None:
    network = load_network(Checkpoint(toy_folder), "unet", FP32, plain=True)
    modules = network.module.modules()
    layers = [m for m in modules if isinstance(m, nn.Linear | nn.Conv2d) and m.weight is not None]
    ranges: dict[str, InputRange] = {}
    with torch.inference_mode():
        with observing(network.module, ranges):
            network.module(*unet_inputs(network))
        network.module(*unet_inputs(network))
    assert len(ranges) == len(layers) > 20
    assert {f"{name}.weight" for name in ranges} <= network.tensors().keys()
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


@pytest.fixture(scope="module")
def calibrated(plan: CalibrationPlan, tmp_path_factory: pytest.TempPathFactory) -> WritableStore:
    """A store with the calibration of the plan. Tests that write copy it."""
    store = open_writable_store(tmp_path_factory.mktemp("calibrated") / "store")
    reports: list[tuple[int, int]] = []
    partial = tmp_path_factory.mktemp("partial")
    unet, decoder = calibrate(plan, store, partial, lambda *progress: reports.append(progress))
    assert reports == [(0, 3), (1, 3), (2, 3), (3, 3)] and list(partial.iterdir()) == []
    assert unet.is_new and {found.calls for found in unet.ranges.values()} == {6}, "three prompts of two guided steps"
    assert decoder.conditions.component == "vae_decoder" and "decoder.conv_in" in decoder.ranges
    assert {found.calls for found in decoder.ranges.values()} == {3}
    return store


def test_calibrates_once(plan: CalibrationPlan, calibrated: WritableStore, tmp_path: Path) -> None:
    unet, decoder = calibrate(plan, calibrated, tmp_path / "partial", lambda *_: pytest.fail("An image is generated."))
    assert not unet.is_new and not decoder.is_new and {found.calls for found in unet.ranges.values()} == {6}
    record = CalibrationRecord.find(calibrated, unet.conditions.key)
    assert record is not None and record.ranges.sha256 in named_blobs(calibrated), "gc would delete the ranges"


def test_stored_ranges_stay_if_another_networks_are_missing(
    plan: CalibrationPlan, calibrated: WritableStore, tmp_path: Path
) -> None:
    """As with another VAE, or after a version that calibrated only UNets: validations name the UNet's record."""
    store = open_writable_store(shutil.copytree(folder_of(calibrated), tmp_path / "store"))
    kept, missing = (
        folder_of(store) / record_key(CalibrationRecord.kind, plan.conditions(name).key) for name in plan.components
    )
    written = missing.read_bytes()
    missing.unlink()
    os.utime(kept, (0, 0))
    unet, decoder = calibrate(plan, store, tmp_path / "partial")
    assert (unet.is_new, decoder.is_new) == (False, True) and {found.calls for found in unet.ranges.values()} == {6}
    assert kept.stat().st_mtime == 0 and missing.read_bytes() == written, "the ranges are the same"


def test_base_runs_all_steps_of_half_of_the_prompts(
    plan: CalibrationPlan, store: WritableStore, tmp_path: Path
) -> None:
    """Requests without a refiner do so too. The first prompt runs both ways, the second and fourth with the refiner."""
    base, refiner = Checkpoint(MODEL_FOLDER), Checkpoint(MODEL_FOLDER / "refiner")
    plan = dataclasses.replace(plan, base=base, refiner=refiner, steps=5, prompts=(*plan.prompts, "a star"))
    calls = {
        network.conditions.component: {found.calls for found in network.ranges.values()}
        for network in calibrate(plan, store, tmp_path / "partial")
    }
    assert calls == {"unet": {(5 + 4) + 4 + 5 + 4}, "refiner_unet": {1 + 1 + 1}, "vae_decoder": {2 + 1 + 1 + 1}}


@pytest.mark.parametrize(("is_damaged", "continued"), [(False, [2, 3]), (True, [0, 1, 2, 3])])
def test_interrupted_calibration_continues(
    is_damaged: bool, continued: list[int], plan: CalibrationPlan, calibrated: WritableStore, store: WritableStore,
    tmp_path: Path,
) -> None:  # fmt: skip
    """With the same ranges. From a damaged file it starts again."""

    def interrupt(done: int, prompts: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan, store, tmp_path / "partial", interrupt)
    assert store.records("calibrations") == []
    if is_damaged:
        [saved] = (tmp_path / "partial").iterdir()
        saved.write_bytes(saved.read_bytes()[:1000])
    reports: list[int] = []
    calibrate(plan, store, tmp_path / "partial", lambda done, prompts: reports.append(done))
    assert reports == continued
    records = store.records("calibrations")
    assert len(records) == 2 and set(records) == set(calibrated.records("calibrations"))
    for key in records:
        assert store.read_record("calibrations", key) == calibrated.read_record("calibrations", key)


def test_other_conditions_and_weights_have_another_key(plan: CalibrationPlan, folder_copy: Path) -> None:
    changes: tuple[dict[str, object], ...] = (
        {"prompts": ("a circle",)}, {"negative_prompt": "blur"}, {"steps": 3}, {"guidance": 5.0}, {"width": 128},
    )  # fmt: skip
    plans = [plan, *(dataclasses.replace(plan, **change) for change in changes)]  # type: ignore[arg-type]
    assert len({changed.conditions("unet").key for changed in plans}) == 6
    assert digest_weights(Checkpoint(folder_copy), "unet") == digest_weights(plan.base, "unet")
    edit_weights(folder_copy / "unet", perturb)
    assert digest_weights(Checkpoint(folder_copy), "unet") != digest_weights(plan.base, "unet")


# -- refusals --------------------------------------------------------------------------------------------------------


def test_refuses_ranges_that_give_no_scale(store: WritableStore) -> None:
    for values, words in (
        (torch.tensor([[1.0, float("nan")]]), "held NaN or infinity"),
        (torch.tensor([[1.0, float("inf")]]), "held NaN or infinity"),
        (torch.zeros(2, 2), "was always zero"),
    ):
        ranges = {"conv_in": observed(torch.ones(1, 2)), "proj": observed(values)}
        with pytest.raises(CalibrationError, match=f"unet's layer proj {words}"):
            write_calibration(store, CONDITIONS, ranges)
    assert store.records("calibrations") == []
    with pytest.raises(CalibrationError, match="has no layers"):
        check_ranges("unet", {})


@pytest.fixture
def record(store: WritableStore) -> CalibrationRecord:
    """A record in the store, of CONDITIONS."""
    write_calibration(store, CONDITIONS, {"proj": observed(torch.ones(1, 2))})
    found = CalibrationRecord.find(store, CONDITIONS.key)
    assert found is not None
    return found


def test_refuses_a_record_of_other_weights_or_an_older_version(store: WritableStore, record: CalibrationRecord) -> None:
    assert read_calibration(store, CONDITIONS.key, "a" * 64)["proj"].absolute_maximum == 1
    assert find_calibration(store, "unet", "a" * 64)[0] == CONDITIONS.key
    with pytest.raises(CalibrationError, match=r"of other weights of unet than this model's.*preheat calibrate"):
        read_calibration(store, CONDITIONS.key, "c" * 64)
    record.model_copy(update={"version": 1}).write(store, CONDITIONS.key)
    with pytest.raises(CalibrationError, match="no intact calibration of this model's unet"):
        find_calibration(store, "unet", "a" * 64)


def test_finds_the_calibration_with_the_most_prompts_then_steps(store: WritableStore) -> None:
    for prompts, steps in ((2, 9), (3, 4), (3, 5), (3, 2)):  # the best one is neither the first nor the last
        conditions = dataclasses.replace(CONDITIONS, prompt_count=prompts, steps=steps)
        write_calibration(store, conditions, {"proj": observed(torch.full((1, 2), float(prompts * steps)))})
    key, ranges = find_calibration(store, "unet", "a" * 64)
    assert ranges["proj"].absolute_maximum == 3 * 5
    assert key == dataclasses.replace(CONDITIONS, prompt_count=3, steps=5).key


def test_refuses_a_damaged_record(store: WritableStore, record: CalibrationRecord) -> None:
    for data in (save({"proj.counts": torch.zeros(3)}), save({"proj.counts": torch.zeros(BINS).long()}), b"text"):
        record.model_copy(update={"ranges": put_blob(store, data)}).write(store, CONDITIONS.key)
        with pytest.raises(CalibrationError, match="of unet is damaged"):
            read_calibration(store, CONDITIONS.key, "a" * 64)
    record.write(store, CONDITIONS.key)
    path = folder_of(store) / "blobs" / "sha256" / record.ranges.sha256
    path.write_bytes(path.read_bytes()[:-10])
    for _ in ("truncated", "missing"):
        with pytest.raises(CalibrationError, match=r"no intact calibration record.*preheat calibrate"):
            read_calibration(store, CONDITIONS.key, "a" * 64)
        path.unlink(missing_ok=True)


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


def test_command_refuses_a_file_without_prompts(toy_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    for content, words in (
        (None, "cannot be read"),
        (b"# none\n\n", "holds no prompt"),
        (b"\xff", "cannot be read"),
        (b"a" * 4001, "is no prompt: at most 4000 characters"),
        (b"a\0b", "without NUL"),
    ):
        if content is not None:
            file.write_bytes(content)
        status, output = run("calibrate", toy_folder, "--prompts", file)
        assert status == 1 and words in output


def test_shipped_prompts_are_128_different_ones() -> None:
    files = list((REPOSITORY / "data" / "prompts").glob("*.txt"))
    assert PROMPTS in files
    for file in files:
        prompts = read_prompts(file.read_text())
        assert len(prompts) == len(set(prompts)) == 128, file
