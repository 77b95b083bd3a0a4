"""Call `generate_loop` or an ensemble of the unrolled pipeline on a Triton server, over HTTP or gRPC.

Triton's HTTP endpoint for models with several responses is `/generate`, which answers with one. Its tensors are lists
of numbers, so large images take longer than over gRPC. Only gRPC streams previews.
"""

import importlib
import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray

from engine_builder.error_text import cause_of
from engine_builder.triton_repository.loop_model import EVENT, FILE, GENERATE_LOOP, REQUEST
from preheat.local_server.client import MAX_TIMEOUT_SECONDS, CallFailed

Protocol = Literal["http", "grpc"]
_START = "Start Triton with a repository of `preheat export-triton` (docs/triton.md), or name it with --address."
INSTALL = "Install the client: `pip install 'preheat[triton]'`."
Event = dict[str, Any]
_DATATYPES = {"uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float32": "FP32"}


def generate(
    protocol: Protocol,
    address: str,
    request: Mapping[str, Any],
    timeout: float,
    version: str = "",
    progress: Callable[[Event, bytes], None] = lambda event, file: None,
) -> list[tuple[Event, bytes]]:
    """Send a request of docs/requests.md. Returns the event and the file of each image, in order.

    address: host and port. version: of the model; "": the newest one. progress: receives each preview's event and
    JPEG, over gRPC and if the request has `stream`. timeout: seconds for the whole answer. Raises CallFailed.
    """
    _check_timeout(timeout)
    body = json.dumps(dict(request)).encode()
    call = _call_http if protocol == "http" else _call_grpc
    return call(address, body, timeout, version, progress)


def generate_pixels(
    protocol: Protocol,
    address: str,
    model: str,
    prompt: str,
    seed: int,
    guidance_scale: float,
    timeout: float,
    negative_prompt: str | None = None,
    version: str = "",
    inputs: Mapping[str, NDArray[Any]] | None = None,
) -> NDArray[np.uint8]:
    """Call an ensemble of `engine_builder.triton_repository.unrolled`. Returns uint8 [height, width, 3].

    address: host and port. version: of the ensemble; "": the newest one. timeout: seconds. inputs: its optional inputs
    by name, without the batch: see docs/triton.md. Raises CallFailed.
    """
    _check_timeout(timeout)
    tensors: dict[str, NDArray[Any]] = {
        "prompt": _utf8(prompt),
        "seed": np.array([[seed]], np.int64),
        "guidance_scale": np.array([[guidance_scale]], np.float32),
    }
    if negative_prompt is not None:
        tensors["negative_prompt"] = _utf8(negative_prompt)
    tensors |= {name: content[None] for name, content in (inputs or {}).items()}
    infer = _infer_http if protocol == "http" else _infer_grpc
    return infer(address, model, tensors, timeout, version)


def _check_timeout(timeout: float) -> None:
    if not 0 < timeout <= MAX_TIMEOUT_SECONDS:  # also refuses NaN
        raise CallFailed(f"A timeout of {timeout:g} s is not possible.", remedy=f"Wait 1 to {MAX_TIMEOUT_SECONDS} s.")


def _utf8(text: str) -> NDArray[np.uint8]:
    """Return the UTF-8 of a text, [1, bytes]. Triton refuses a text with a lone surrogate."""
    return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)[None]


def _infer_http(
    address: str, model: str, tensors: Mapping[str, NDArray[Any]], timeout: float, version: str
) -> NDArray[np.uint8]:
    """Call Triton's HTTP endpoint. Tensors are binary, after the JSON of the request and of the answer."""
    path = f"/versions/{version}" if version else ""
    inputs = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": _DATATYPES[array.dtype.name],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in tensors.items()
    ]
    outputs = [{"name": "image", "parameters": {"binary_data": True}}]
    header = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    content = b"".join([header, *(array.tobytes() for array in tensors.values())])
    with _http_errors(address):
        url = f"http://{address}/v2/models/{model}{path}/infer"
        lengths = {"Inference-Header-Content-Length": str(len(header))}
        answer = httpx.post(url, content=content, headers=lengths, timeout=timeout, trust_env=False)
        if not answer.is_success:
            raise _refused(address, answer.json()["error"], answer.status_code)
        length = int(answer.headers["Inference-Header-Content-Length"])
        [image] = json.loads(answer.content[:length])["outputs"]
        pixels = np.frombuffer(answer.content[length:], np.uint8).reshape(image["shape"])
        return np.ascontiguousarray(pixels[0])


def _infer_grpc(
    address: str, model: str, tensors: Mapping[str, NDArray[Any]], timeout: float, version: str
) -> NDArray[np.uint8]:
    grpc = _import_grpc()
    inputs = []
    for name, array in tensors.items():
        inputs.append(grpc.InferInput(name, list(array.shape), _DATATYPES[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    try:
        with grpc.InferenceServerClient(address) as client:
            result = client.infer(model, inputs, version, client_timeout=timeout)
    except grpc.InferenceServerException as error:
        raise _grpc_failure(address, error) from error
    pixels: NDArray[np.uint8] = result.as_numpy("image")[0]
    return pixels


@contextmanager
def _http_errors(address: str) -> Iterator[None]:
    """Raise CallFailed in place of the errors of a call, and of an answer in another form than Triton's."""
    try:
        yield
    except (httpx.InvalidURL, UnicodeError) as error:
        raise CallFailed(f"{address!r} is not an address: {cause_of(error)}.", remedy="Give HOST:PORT.") from error
    except httpx.TimeoutException as error:
        raise CallFailed(f"{address} gave no answer in time.", remedy="Give a longer --timeout.") from error
    except httpx.HTTPError as error:
        raise CallFailed(f"{address} cannot be reached: {cause_of(error)}.", remedy=_START) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CallFailed(f"{address} answered in another form than Triton's.") from error


def _refused(address: str, reason: object, status: int | None = None) -> CallFailed:
    return CallFailed(f"{address} refused the request: {str(reason).rstrip('.')}.", status)


def _grpc_failure(address: str, error: Any) -> CallFailed:
    """Return the error of a call over gRPC: of a server that does not answer, or that refused the request."""
    if "UNAVAILABLE" in str(error.status()):
        return CallFailed(f"{address} cannot be reached over gRPC.", remedy=_START)
    if "DEADLINE_EXCEEDED" in str(error.status()):
        return CallFailed(f"{address} gave no answer in time.", remedy="Give a longer --timeout.")
    return _refused(address, error.message())


def _import_grpc() -> Any:
    try:
        return importlib.import_module("tritonclient.grpc")
    except ImportError as error:
        raise CallFailed(f"gRPC needs the package tritonclient ({cause_of(error)}).", remedy=INSTALL) from error


def _call_http(
    address: str, body: bytes, timeout: float, version: str, progress: Callable[[Event, bytes], None]
) -> list[tuple[Event, bytes]]:
    path = f"/versions/{version}" if version else ""
    url = f"http://{address}/v2/models/{GENERATE_LOOP}{path}/generate"
    with _http_errors(address):
        answer = httpx.post(url, json={REQUEST: list(body)}, timeout=timeout, trust_env=False)
        values = answer.json()
        if not answer.is_success:
            raise _refused(address, values["error"], answer.status_code)
        return [(json.loads(bytes(values[EVENT])), bytes(values[FILE]))]


def _call_grpc(
    address: str, body: bytes, timeout: float, version: str, progress: Callable[[Event, bytes], None]
) -> list[tuple[Event, bytes]]:
    grpc = _import_grpc()
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    images: list[tuple[Event, bytes]] = []
    client, end = None, time.monotonic() + timeout
    try:
        client = grpc.InferenceServerClient(address)
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensor = grpc.InferInput(REQUEST, [len(body)], "UINT8")
        tensor.set_data_from_numpy(np.frombuffer(body, np.uint8))
        client.async_stream_infer(GENERATE_LOOP, [tensor], version, enable_empty_final_response=True)
        while True:
            result, failure = answers.get(timeout=max(0.0, end - time.monotonic()))
            if failure is not None:
                raise _grpc_failure(address, failure)
            if (file := result.as_numpy(FILE)) is not None:
                event = json.loads(bytes(result.as_numpy(EVENT)))
                if event["event"] == "image":
                    images.append((event, bytes(file)))
                else:
                    progress(event, bytes(file))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return images
    except queue.Empty as error:
        raise CallFailed(f"{address} gave no answer within {timeout:g} s.") from error
    except grpc.InferenceServerException as error:
        # A stream that broke states only that. The callback has received why.
        with suppress(queue.Empty):
            _, failure = answers.get(timeout=1)
            raise _grpc_failure(address, failure or error) from error
        raise _grpc_failure(address, error) from error
    except ValueError as error:
        raise CallFailed(f"{address} cannot be called: {cause_of(error)}.", remedy=_START) from error
    finally:
        if client is not None:
            client.stop_stream(cancel_requests=True)
            client.close()
