"""The model in a process of the server image: its imports, and its end after a device failure."""

import json
import subprocess
from typing import Any

import pytest

from model.store.store import Store
from preheat.local_server.server import Layout
from tests.conftest import READY_SECONDS
from tests.support.image_process import run_in_image

SCRIPT = """
    import asyncio, json, sys

    import yaml
    from starlette.requests import Request

    from model.request_fields import GenerationRequest
    from model.model import Model

    model = Model(config=yaml.safe_load(open("config.yaml")))
    model.load()
    model.load()  # Truss may call it again
    http = Request({"type": "http", "headers": []}, lambda: asyncio.Event().wait())

    async def predict():
        request = GenerationRequest(prompt="a circle", use_refiner=True, num_inference_steps=4)
        response = await model.predict(request, http)
        return [response.status_code, json.loads(response.body), await model.is_healthy()]

    async def serve():
        print(json.dumps({"before": await predict(), "modules": sorted(sys.modules)}), flush=True)

        import torch
        from model.denoising.eager_loop import EagerLoop

        def fail(loop):
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        EagerLoop.step = fail
        print(json.dumps([await predict(), await predict()]), flush=True)
        await asyncio.sleep(60)

    asyncio.run(serve())
"""


@pytest.fixture(scope="module")
def process(layout: Layout, store: Store, release: str) -> subprocess.CompletedProcess[str]:
    """A process that has loaded a release and generated an image. Then its device failed."""
    return run_in_image(SCRIPT, layout, store, release, READY_SECONDS)


def printed(process: subprocess.CompletedProcess[str], line: int) -> Any:
    lines = process.stdout.splitlines()
    assert len(lines) == 2, process.stderr
    return json.loads(lines[line])


def test_repeated_load_serves(process: subprocess.CompletedProcess[str]) -> None:
    status, body, healthy = printed(process, 0)["before"]
    assert (status, body["status"], healthy) == (200, "success", True)


def test_serving_imports_no_library_of_the_builder(process: subprocess.CompletedProcess[str]) -> None:
    """They cost seconds of every cold start."""
    modules = set(printed(process, 0)["modules"])
    assert {"torch", "tokenizers", "model.pipeline.text_to_image"} <= modules
    # torch imports torch.export itself, but must not import the compiler.
    unwanted = {
        "diffusers", "transformers", "accelerate", "huggingface_hub", "engine_builder", "boto3", "torch._inductor",
        "torch._dynamo", "triton", "scipy", "tests", "tensorrt", "tensorrt_rtx_bindings", "onnx", "onnxruntime",
    }  # fmt: skip
    assert sorted(modules & unwanted) == []


def test_device_failure_ends_the_process(process: subprocess.CompletedProcess[str]) -> None:
    """The platform then replaces it. Its callers are answered first."""
    assert process.returncode == 70, process.stderr
    for status, body, healthy in printed(process, 1):
        assert (status, body["kind"], healthy) == (503, "unavailable", False)
