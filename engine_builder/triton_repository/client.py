"""Call `generate_loop` on a Triton server, over HTTP or gRPC.

Triton's HTTP endpoint for models with several responses is `/generate`, which answers with one. Its tensors are lists
of numbers, so large images take longer than over gRPC. Only gRPC streams previews.
"""

import importlib
import json
import queue
from collections.abc import Callable, Mapping
from typing import Any, Literal

import httpx
import numpy as np

from engine_builder.local_server.client import MAX_TIMEOUT_SECONDS, CallFailed
from engine_builder.triton_repository.loop_model import EVENT, FILE, GENERATE_LOOP, REQUEST

Protocol = Literal["http", "grpc"]
INSTALL = "Install the client: `pip install 'preheat[triton]'`."
Event = dict[str, Any]


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
    if not 0 < timeout <= MAX_TIMEOUT_SECONDS:  # also refuses NaN
        raise CallFailed(f"A timeout of {timeout:g} s is not possible.", remedy=f"Wait 1 to {MAX_TIMEOUT_SECONDS} s.")
    body = json.dumps(dict(request)).encode()
    call = _call_http if protocol == "http" else _call_grpc
    return call(address, body, timeout, version, progress)


def _call_http(
    address: str, body: bytes, timeout: float, version: str, progress: Callable[[Event, bytes], None]
) -> list[tuple[Event, bytes]]:
    path = f"/versions/{version}" if version else ""
    url = f"http://{address}/v2/models/{GENERATE_LOOP}{path}/generate"
    try:
        answer = httpx.post(url, json={REQUEST: list(body)}, timeout=timeout, trust_env=False)
        values = answer.json()
        if answer.is_success:
            return [(json.loads(bytes(values[EVENT])), bytes(values[FILE]))]
        reason = str(values["error"])
    except httpx.InvalidURL as error:
        raise CallFailed(f"{address!r} is not an address: {error}.", remedy="Give HOST:PORT.") from error
    except httpx.HTTPError as error:
        raise CallFailed(f"{address} gave no answer: {error or type(error).__name__}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CallFailed(f"{address} answered {answer.status_code} in another form than Triton's.") from error
    raise CallFailed(f"{address} refused the request: {reason}", answer.status_code)


def _call_grpc(
    address: str, body: bytes, timeout: float, version: str, progress: Callable[[Event, bytes], None]
) -> list[tuple[Event, bytes]]:
    try:
        grpc = importlib.import_module("tritonclient.grpc")
    except ImportError as error:
        raise CallFailed(f"gRPC needs the package tritonclient ({error}).", remedy=INSTALL) from error
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    images: list[tuple[Event, bytes]] = []
    client = None
    try:
        client = grpc.InferenceServerClient(address)
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensor = grpc.InferInput(REQUEST, [len(body)], "UINT8")
        tensor.set_data_from_numpy(np.frombuffer(body, np.uint8))
        client.async_stream_infer(GENERATE_LOOP, [tensor], version, enable_empty_final_response=True)
        while True:
            result, failure = answers.get(timeout=timeout)
            if failure is not None:
                raise CallFailed(f"{address} refused the request: {failure.message()}")
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
    except (grpc.InferenceServerException, ValueError) as error:
        raise CallFailed(f"{address} cannot be called: {error}.") from error
    finally:
        if client is not None:
            client.stop_stream(cancel_requests=True)
            client.close()
