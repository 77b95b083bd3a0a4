"""Usage errors end a command with status 2, whatever is installed: arguments are checked before packages are needed."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_builder.backends.tensorrt.plan_options import InvalidOption
from engine_builder.gpus import UnknownGpu
from model.errors import PreheatError
from preheat.main import RENAMED_OPTIONS, app
from tests.support.repository import MODEL_FOLDER

OPTIONAL = ("tensorrt", "tensorrt_rtx_bindings", "tritonclient", "triton", "cuda", "onnx", "onnxruntime", "onnxscript")
RTX = ["--runtime", "tensorrt-rtx"]
L4 = [*RTX, "--gpu", "l4"]


@pytest.fixture(autouse=True)
def without_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each import of an optional package fail, as where only `make setup` ran, or less."""
    for name in OPTIONAL:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)


BUILD: list[tuple[list[str], str]] = [
    (["--precision", "fp8"], "fp8 needs an NVIDIA GPU"),
    (["--policy", "policy.toml"], "is an option of --precision fp8"),
    (["--report"], "is an option of --precision fp8"),
    (["--vae-precision", "fp8"], "fp8 is not supported for the VAE"),
    (["--bands", "3"], "3 is not one of 2, 4, 8"),
    (["--gpu", "a10g"], "is an option of --runtime tensorrt-rtx"),
    (["--runtime", "cuda"], "'cuda' is not one of aot_inductor, tensorrt, tensorrt-rtx"),
    ([*L4, "--precision", "fp8"], "not supported for tensorrt-rtx"),
    ([*L4, "--precision", "bf16"], "'bf16' is not supported for tensorrt-rtx; choose one of fp32, "),
    ([*L4, "--vae-precision", "int8"], "'int8' is not supported for tensorrt-rtx"),
    ([*L4, "--report"], "is an option of --precision fp8"),
    ([*L4, "--policy", "policy.toml"], "is an option of --precision fp8"),
    ([*L4, "--size", "big"], "'big' is not WIDTHxHEIGHT@BATCH"),
    ([*L4, "--text-chunks", "3"], "3 is not one of 1, 2, 4"),
    ([*L4, "--lora", "x.safetensors"], "needs --name"),
    ([*L4, "--lora", "x.safetensors:nan", "--name", "x"], "is not PATH:SCALE"),
    ([*L4, "--lora-rank", "8"], "is an option of --runtime aot_inductor"),
    ([*L4, "--safety-checker", "x"], "is an option of --runtime aot_inductor"),
    ([*RTX, "--bands", "2"], "is not supported for plans"),
    ([*RTX, "--lora-rank", "999"], "less than or equal to 128"),
    (["--runtime", "tensorrt", "--precision", "bf16"], "'bf16' is not supported for tensorrt"),
    (["--runtime", "tensorrt", "--size", "big"], "'big' is not WIDTHxHEIGHT@BATCH"),
]
OTHERS: list[tuple[list[str], str]] = [
    (["export-onnx", "missing", "--precision", "bf16"], "'bf16' is not supported for onnx"),
    (["export-onnx", "missing", "--opset", "7"], "7 is not supported"),
    (["export-onnx", "missing", "--policy", "policy.toml"], "is an option of --precision fp8"),
    (["check-fp8", "missing", "--quantized", "fp4"], "'fp4' is not fp8 or int8"),
    (["check-fp8", "missing", "--precision", "fp9"], "'fp9' is not one of"),
    (["check-fp8", "missing", "--refiner", "x", "--no-refiner"], "contradicts --refiner"),
    (["calibrate", "missing", "--prompts", "missing", "--precision", "fp9"], "'fp9' is not one of"),
    (["calibrate", "missing", "--prompts", "missing", "--refiner", "x", "--no-refiner"], "contradicts --refiner"),
    (["load", "x/1", "--size", "big"], "'big' is not WIDTHxHEIGHT"),
    (["bench", "latency", "x/1", "--size", "big"], "'big' is not WIDTHxHEIGHT"),
    (["bench", "latency", "x/1", "--compiled"], "needs a peer"),
    (["bench", "cold-start", "x/1", "--size", "big"], "'big' is not WIDTHxHEIGHT"),
    (["bench", "cold-start", "x/1", "--bucket", "big"], "'big' is not WIDTHxHEIGHT@BATCH"),
    (["bench", "multi-gpu", "x/1", "--bands", "3"], "3 is not 1, 2, 4 or 8"),
    (["triton-client", "x", "--grpc", "--triton-model", "generate_20_pipeline", "--steps", "3"], "are fixed"),
    (["publish", "x", "--without-fp8", "--accept"], "contradicts --accept"),
    (["releases", "--out", "x"], "is an option of --validation"),
]


def test_invalid_options_end_with_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build = ["build", str(MODEL_FOLDER), "--store", str(tmp_path / "store")]
    for arguments, message in [*(([*build, *options], message) for options, message in BUILD), *OTHERS]:
        ran = CliRunner().invoke(app, arguments)
        assert ran.exit_code == 2, (arguments, ran.output, ran.exception)
        assert message in " ".join(ran.output.replace("│", " ").split()), (arguments, ran.output)
    assert not (tmp_path / "store").exists()


def test_older_spellings_of_options_are_accepted_with_a_note() -> None:
    """The value is read as that of today's option, so a wrong one is refused by today's name."""
    for command, renamed in RENAMED_OPTIONS.items():
        for old, new in renamed.items():
            name = command.replace("_", "-")
            for given in ([f"{old}="], [old]):
                ran = CliRunner().invoke(app, [name, *given])
                assert ran.output.startswith(f"{old} is now {new}\n"), ran.output
                assert f"No such option: {old}" not in ran.output
            assert new in CliRunner().invoke(app, [name, "--help"]).output


PLANS: list[tuple[list[str], type[PreheatError], str]] = [
    ([*RTX, "--gpu", "h100"], UnknownGpu, "TensorRT-RTX does not support the GPU h100 (compute capability 9.0)"),
    ([*RTX, "--gpu", "a1000"], UnknownGpu, "The GPU 'a1000' is not known. Choose from t4, a100,"),
    ([*L4, "--refit", "identical"], InvalidOption, "--refit identical is an option of TensorRT: plans of"),
    (
        [*L4, "--compatibility", "ampere_plus"],
        InvalidOption,
        "--compatibility ampere_plus is an option",
    ),
    (RTX, InvalidOption, "TensorRT-RTX builds for any of its GPUs, and none is named. Name one or more, such as"),
    (["--runtime", "tensorrt", "--gpu", "a10g"], InvalidOption, "so --gpu has no effect"),
]


def test_build_names_an_invalid_option_of_plans(tmp_path: Path) -> None:
    for arguments, error, message in PLANS:
        ran = CliRunner().invoke(app, ["build", str(MODEL_FOLDER), "--store", str(tmp_path / "store"), *arguments])
        assert isinstance(ran.exception, error) and message in str(ran.exception), arguments
    assert not (tmp_path / "store").exists()
