"""What every model has in common inside of Triton's python backend: its store, its tensors, its errors.

Triton imports this in the stub process of a model, with the packages of the models' environment. It imports model/ and
nothing of the builder that needs diffusers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack
from pydantic import ValidationError

from engine_builder.triton_repository.config import TritonConfigError
from model.errors import PreheatError, RequestRefused
from model.request_fields import GenerationRequest
from model.settings import Settings, read_settings
from model.store.local import LocalStore
from model.validation import explain

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found, unused-ignore] # isort: skip


def open_release(args: Mapping[str, str]) -> tuple[LocalStore, Settings]:
    """Return a version's store, and the environment's settings with its release. args: of Triton's `initialize`.

    The store has no adapters, so the settings have none.
    """
    folder = Path(args["model_repository"]) / args["model_version"] / "store"
    store = LocalStore(folder)
    names = store.releases()
    if len(names) != 1:
        raise TritonConfigError(f"{folder} has {len(names)} releases, and a version has one.")
    return store, read_settings().of_release(names[0]).model_copy(update={"loras": []})


def as_triton_error(model: str, error: Exception) -> Exception:
    """Return the error that Triton reports for a model: its name and the reason."""
    failure: Exception = pb_utils.TritonModelException(f"{model}: {_text(error)}")
    return failure


def refusal(error: ValidationError) -> RequestRefused:
    """Return the refusal of a request, which names the field, the value and what is accepted."""
    problem = explain(error, GenerationRequest)[0]
    return RequestRefused(problem.field or "request", f"{problem.message}.")


def read_tensor(request: Any, name: str) -> torch.Tensor | None:
    """Return an input without copying it, or None if the request lacks it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else torch.utils.dlpack.from_dlpack(tensor)


def read_bytes(request: Any, name: str) -> bytes | None:
    """Return the bytes of an UINT8 input, or None if the request lacks it."""
    tensor = read_tensor(request, name)
    return None if tensor is None else bytes(tensor.cpu().numpy())


def response(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a response with these outputs."""
    outputs = [pb_utils.Tensor.from_dlpack(name, tensor.contiguous()) for name, tensor in tensors.items()]
    return pb_utils.InferenceResponse(output_tensors=outputs)


def error_response(error: BaseException) -> Any:
    """Return a response with the message of an error."""
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(_text(error)))


def log_failure(model: str, error: BaseException) -> None:
    """Write the error that ended a request to Triton's log."""
    pb_utils.Logger.log_warn(f"{model}: {_text(error)}")


def send_last(sender: Any, last: Any) -> None:
    """Send the last response of a request."""
    sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, PreheatError) else f"{type(error).__name__}: {error}"
