"""Time one step of SDXL's UNet and one decoding in TensorRT 8.6, in AOTInductor and in diffusers, on one GPU.

Run `python -m engine_builder.benchmarks.tensorrt_8.compare` with these commands, in this order:

    prepare MODEL WORK --graphs GRAPHS                 # graphs with weights, inputs, outputs of eager PyTorch
    compile MODEL WORK                                 # AOTInductor engines
    plan WORK --python PYTHON39                        # TensorRT plans
    measure MODEL WORK --python PYTHON39 --out ROWS.json

MODEL is a folder in diffusers' layout. GRAPHS is a folder that `preheat export-onnx MODEL --opset 17 --out GRAPHS`
wrote on any machine; its weights are not needed. PYTHON39 has tensorrt==8.6.0, numpy and cuda-python (see `worker`).
`plan` keeps the timing cache in WORK, so a second call builds faster.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from safetensors.torch import save_file

from engine_builder.backends.aot_inductor.compile import build_target, compile_network, example_inputs, static_bucket
from engine_builder.backends.onnx.export import OnnxGraph, write_model
from engine_builder.benchmarks.rows import Row, finish, make_row
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.kernel_form import plain_operations
from engine_builder.networks.network import Network, load_network
from model.cuda.graphs import capture
from model.engines.aot_inductor.engine import AotInductorEngine
from model.pipeline.spec import UNET, VAE_DECODER
from model.store.manifest import Bucket
from model.store.precision import FP16

WORKER = Path(__file__).parent / "worker.py"
REPOSITORY = Path(__file__).parents[3]
SIDE = 1024  # pixels
BUCKETS: dict[str, Bucket] = {UNET: static_bucket(2, SIDE, SIDE), VAE_DECODER: static_bucket(1, SIDE, SIDE)}
STEPS, RUNS, WARM_UPS = 30, 30, 5


def prepare(model: Path, work: Path, graphs: Path) -> None:
    """Write each component's graph with the model's weights, random inputs, and eager PyTorch's outputs in fp32."""
    for component, bucket in BUCKETS.items():
        network = load_network(Checkpoint(model), component, FP16, "cuda", plain=True)
        weights = work / f"{component}-weights"
        save_file({name: tensor.contiguous().cpu() for name, tensor in network.tensors().items()}, weights)
        inputs = inputs_of(network, bucket)
        graph = _with_static_shapes((graphs / f"{component}.onnx").read_bytes(), inputs)
        write_model(graph, [weights], work / component / f"{component}.onnx", link=True)
        _save(work / component / "inputs", inputs)
        with torch.inference_mode(), plain_operations():
            exact = network.module.float()(*(t.float() if t.is_floating_point() else t for t in inputs.values()))
        names = [spec.name for spec in network.signature.outputs]
        _save(work / component / "expected", dict(zip(names, exact, strict=True)))
        print(f"{component}: prepared", flush=True)


def _with_static_shapes(data: bytes, inputs: Mapping[str, torch.Tensor]) -> OnnxGraph:
    """Return a graph without weights whose inputs have the shapes of `inputs`. An initializer has its tensor's name."""
    model = onnx.load_from_string(data)
    for value in model.graph.input:
        for dimension, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True):
            dimension.dim_value = size
    external = [init.name for init in model.graph.initializer if init.data_location == init.EXTERNAL]
    return OnnxGraph(model.SerializeToString(), {name: {"tensor": name} for name in external})


def inputs_of(network: Network, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return the inputs that all runtimes get."""
    return example_inputs(network.signature, bucket.batch.max, SIDE, SIDE, "cuda")


def compile_engines(model: Path, work: Path) -> None:
    """Compile the AOTInductor engine of each component, and write its package, map of constants and build seconds."""
    target = build_target()
    for component, bucket in BUCKETS.items():
        network = load_network(Checkpoint(model), component, FP16, "cuda")
        started = time.perf_counter()
        compiled = compile_network(network, target, bucket, work / f"{component}.pt2")
        (work / f"{component}.constants.json").write_bytes(compiled.constants_json())
        _write_facts(work, f"{component}-aot_inductor", {"build_seconds": round(time.perf_counter() - started, 1)})
        print(f"{component}: compiled in {time.perf_counter() - started:.0f} s", flush=True)


def build_plans(work: Path, python: Path, level: int, components: list[str]) -> None:
    """Build the plan of each component in the worker."""
    for component in components:
        folder = work / component
        arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted((folder / "inputs").glob("*.npy"))}
        shapes = [f"--shape={name}={'x'.join(map(str, array.shape))}" for name, array in arrays.items()]
        facts = run_worker(
            python, "build", folder / f"{component}.onnx", work / f"{component}.plan",
            "--timing-cache", work / "timing.cache", "--level", level, *shapes,
        )  # fmt: skip
        _write_facts(work, f"{component}-tensorrt", facts)
        print(f"{component}: {facts}", flush=True)


def run_worker(python: Path, *arguments: object) -> dict[str, Any]:
    """Run a command of the worker, and return its facts. Ends this process if it fails."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([python, WORKER, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The worker failed with {done.returncode}: {done.stdout[-500:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def measure(model: Path, work: Path, python: Path) -> list[Row]:
    """Return a row for each runtime and component, all measured one after the other on this GPU."""
    rows: list[Row] = []

    def add(component: str, runtime: str, times: list[float], **extra: Any) -> None:
        network, batch = ("UNet step", 2) if component == UNET else ("decoding", 1)
        row = make_row(f"{network}, {runtime}", times, "ms", "float16", 1, batch, digits=3, **extra)
        rows.append(row)
        print(f"{row.case:32} {row.value:8.3f} ms  {extra}", flush=True)

    for component, bucket in BUCKETS.items():
        for runtime, (times, extra) in (
            ("TensorRT 8.6.0", measure_plan(work, python, component)),
            ("AOTInductor", measure_engine(model, work, component, bucket)),
        ):
            add(component, runtime, times, **extra)
        torch.cuda.empty_cache()
    for compiled in (False, True):
        for component, times in measure_diffusers(model, compiled).items():
            add(component, "diffusers compiled" if compiled else "diffusers eager", times)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    for runtime in ("TensorRT 8.6.0", "AOTInductor", "diffusers eager", "diffusers compiled"):
        step, decoding = (
            next(r.value for r in rows if r.case == f"{part}, {runtime}") for part in ("UNet step", "decoding")
        )
        print(f"{runtime}: {STEPS} steps {STEPS * step:.0f} ms, with decoding {STEPS * step + decoding:.0f} ms")
    return rows


def measure_plan(work: Path, python: Path, component: str) -> tuple[list[float], dict[str, Any]]:
    folder = work / component
    facts = run_worker(python, "run", work / f"{component}.plan", folder / "inputs", folder / "outputs", "--runs", RUNS)
    outputs = {path.stem: torch.from_numpy(np.load(path)) for path in (folder / "outputs").glob("*.npy")}
    built = _read_facts(work, f"{component}-tensorrt")
    return facts.pop("graph_milliseconds_of_runs"), built | facts | {
        "relative_error": relative_error(work, component, outputs)
    }


def measure_engine(model: Path, work: Path, component: str, bucket: Bucket) -> tuple[list[float], dict[str, Any]]:
    """Return the milliseconds of each run, and facts. The weights are on the GPU before `load_seconds` begin.

    A plan's `load_seconds` include its weights, so the two cannot be compared.
    """
    network = load_network(Checkpoint(model), component, FP16, "cuda")
    inputs = inputs_of(network, bucket)
    package, constants = ((work / f"{component}.{suffix}").read_bytes() for suffix in ("pt2", "constants.json"))
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine = AotInductorEngine(
        component, package, network.signature, bucket, constants, network.tensors(), torch.device("cuda", 0)
    )
    outputs: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        outputs |= engine.run(inputs)
        torch.cuda.synchronize()
        load_seconds = round(time.perf_counter() - started, 2)
        replay = capture(lambda: outputs.update(engine.run(inputs)))
        times = milliseconds(replay)
    facts = {"load_seconds": load_seconds, "engine_bytes": len(package)} | _read_facts(
        work, f"{component}-aot_inductor"
    )
    return times, facts | {"relative_error": relative_error(work, component, outputs)}


def measure_diffusers(model: Path, compiled: bool) -> dict[str, list[float]]:
    """Return the milliseconds of diffusers' UNet on two latents and of its decoder on one, in fp16."""
    from engine_builder.benchmarks.peers import diffusers_pipeline

    pipeline = diffusers_pipeline(Checkpoint(model), "float16", compiled)
    config, side = pipeline.unet.config, SIDE // 8
    pooled_width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    shapes = ((2, 4, side, side), (2, 77, config.cross_attention_dim), (2, pooled_width))
    latents, text, pooled = (torch.randn(shape, dtype=torch.float16, device="cuda") for shape in shapes)
    time_ids = torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]] * 2, dtype=torch.float16, device="cuda")
    timestep = torch.tensor(500, device="cuda")

    def step() -> None:
        pipeline.unet(
            latents, timestep, encoder_hidden_states=text, return_dict=False,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids},
        )  # fmt: skip

    def decode() -> None:
        pipeline.vae.decode(latents[:1], return_dict=False)

    with torch.inference_mode():
        return {UNET: milliseconds(step), VAE_DECODER: milliseconds(decode)}


def milliseconds(work: Callable[[], None]) -> list[float]:
    """Return the milliseconds of each of the runs, by events, after warm-ups."""
    for _ in range(WARM_UPS):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]


def relative_error(work: Path, component: str, outputs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error, by norm, against eager PyTorch in fp32."""
    errors = []
    for path in (work / component / "expected").glob("*.npy"):
        expected = torch.from_numpy(np.load(path)).double()
        errors.append(float((outputs[path.stem].cpu().double() - expected).norm() / expected.norm()))
    return round(max(errors), 5)


def _write_facts(work: Path, name: str, facts: dict[str, Any]) -> None:
    (work / f"{name}.json").write_text(json.dumps(facts))


def _read_facts(work: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return facts


def _save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor.cpu().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "compile", "plan", "measure"):
        command = commands.add_parser(name)
        if name != "plan":
            command.add_argument("model", type=Path)
        command.add_argument("work", type=Path)
        if name in ("plan", "measure"):
            command.add_argument("--python", type=Path, required=True, help="Python 3.9 with TensorRT 8.6")
    commands.choices["prepare"].add_argument("--graphs", type=Path, required=True)
    commands.choices["plan"].add_argument("--level", type=int, default=2, help="0 (fast) to 5 (thorough)")
    commands.choices["plan"].add_argument("--component", action="append", choices=list(BUCKETS))
    commands.choices["measure"].add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    match options.command:
        case "prepare":
            prepare(options.model, options.work, options.graphs)
        case "compile":
            compile_engines(options.model, options.work)
        case "plan":
            build_plans(options.work, options.python, options.level, options.component or list(BUCKETS))
        case "measure":
            finish(measure(options.model, options.work, options.python), options.out)


if __name__ == "__main__":
    main()
