"""The models of a Triton repository as data, their config.pbtxt, and the check of a config against a model.

Text and files travel as UINT8 tensors. The python backend of Triton 2.51 cannot pass strings with NumPy 2, which
Preheat needs. The format is that of Triton's model_config.proto. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from model.errors import PreheatError

ANY = -1  # a dimension of any size
QUEUE_DELAY_MICROSECONDS = 5000  # that a request waits for others to share its batch


class TritonConfigError(PreheatError):
    """A config.pbtxt of a model repository does not fit the release that the model has."""

    remedy = "Write the repository again (`preheat export-triton`)."


@dataclass(frozen=True)
class Tensor:
    """An input or output. `type` is Triton's name without "TYPE_". `dims` are without the batch."""

    name: str
    type: Literal["UINT8", "INT32", "INT64", "FP16", "BF16", "FP32"]
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class TritonModel:
    """One model of the repository.

    serving: the module and class that Triton's process runs, or "" for an ensemble.
    max_batch: images of one call; 0: tensors have no batch.
    preferred: batch sizes that Triton's dynamic batching prefers; empty: requests are not merged.
    decoupled: true if a request has several responses.
    warms_up: true if Triton sends a request before the model is ready, with the inputs of `warmup`, others zero.
    warmup: the content of inputs of the warm-up request, by input.
    steps: of an ensemble: the models, with the names that their inputs and outputs have in the ensemble.
    parameters: that the serving class reads.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    serving: str = ""
    max_batch: int = 0
    preferred: tuple[int, ...] = ()
    decoupled: bool = False
    warms_up: bool = False
    warmup: Mapping[str, bytes] = field(default_factory=dict)
    steps: "tuple[EnsembleStep, ...]" = ()
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EnsembleStep:
    """A call of a model in an ensemble. `inputs`, `outputs`: the model's tensor -> its name in the ensemble."""

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def config_text(model: TritonModel, versions: Sequence[int]) -> str:
    """Return the config.pbtxt of a model with these versions, all of which Triton loads."""
    lines = [f'name: "{model.name}"', 'platform: "ensemble"' if model.steps else 'backend: "python"']
    lines.append(f"max_batch_size: {model.max_batch}")
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        lines += [f"{kind} [", ",\n".join(_tensor_text(tensor) for tensor in tensors), "]"]
    lines.append(f"version_policy {{ specific {{ versions: [{', '.join(map(str, versions))}] }} }}")
    if model.steps:
        return "\n".join([*lines, "ensemble_scheduling {", *map(_step_text, model.steps), "}", ""])
    # The engines choose GPU or CPU by themselves, as on the Truss server. One instance has one copy of weights.
    lines.append("instance_group [{ kind: KIND_AUTO count: 1 }]")
    if model.preferred:
        sizes = ", ".join(map(str, model.preferred))
        lines.append(
            f"dynamic_batching {{ preferred_batch_size: [{sizes}] "
            f"max_queue_delay_microseconds: {QUEUE_DELAY_MICROSECONDS} }}"
        )
    if model.decoupled:
        lines.append("model_transaction_policy { decoupled: true }")
    for key, value in model.parameters.items():
        lines.append(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}')
    if model.warms_up:
        lines += ["model_warmup [{", '  name: "warm up"', f"  batch_size: {1 if model.max_batch else 0}"]
        lines += [_warmup_text(tensor, model.warmup.get(tensor.name)) for tensor in model.inputs if not tensor.optional]
        lines.append("}]")
    return "\n".join([*lines, ""])


def _tensor_text(tensor: Tensor) -> str:
    dims = ", ".join(map(str, tensor.dims))
    optional = " optional: true" if tensor.optional else ""
    return f'  {{ name: "{tensor.name}" data_type: TYPE_{tensor.type} dims: [{dims}]{optional} }}'


def _step_text(step: EnsembleStep) -> str:
    maps = [("input_map", key, value) for key, value in step.inputs.items()]
    maps += [("output_map", key, value) for key, value in step.outputs.items()]
    lines = [f'    {kind} {{ key: "{key}" value: "{value}" }}' for kind, key, value in maps]
    head = f'  step {{ model_name: "{step.model}" model_version: {step.version}'
    return "\n".join([head, *lines, "  }"])


def _warmup_text(tensor: Tensor, content: bytes | None) -> str:
    """Return an input of the warm-up request. `content`: of a file of the folder `warmup`; None: zeros."""
    dims = ", ".join(str(len(content or b"") if dim == ANY else dim) for dim in tensor.dims)
    data = "zero_data: true" if content is None else f'input_data_file: "{tensor.name}"'
    return f'  inputs {{ key: "{tensor.name}" value: {{ data_type: TYPE_{tensor.type} dims: [{dims}] {data} }} }}'


def check_config(config: Mapping[str, Any], expected: TritonModel) -> None:
    """Compare the config that Triton parsed with the model of the release. Raises TritonConfigError.

    `config`: the JSON object that the python backend passes to `initialize`.
    """
    if config["max_batch_size"] != expected.max_batch:
        raise TritonConfigError(
            f"config.pbtxt of {expected.name} has max_batch_size {config['max_batch_size']}, and the release's is "
            f"{expected.max_batch}."
        )
    for kind, tensors in (("input", expected.inputs), ("output", expected.outputs)):
        found = {entry["name"]: (entry["data_type"], tuple(map(int, entry["dims"]))) for entry in config[kind]}
        wanted = {tensor.name: (f"TYPE_{tensor.type}", tensor.dims) for tensor in tensors}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise TritonConfigError(
                    f"config.pbtxt of {expected.name} has {kind} {name} as {_describe(found.get(name))}, and the "
                    f"release's is {_describe(wanted.get(name))}."
                )


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
