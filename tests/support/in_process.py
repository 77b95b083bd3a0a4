"""A loaded release behind HTTP in this process: the service and its scheduler, without Truss's own code.

`tests/model/api/test_service.py` and `tests/model/api/test_serving.py` send the same requests to a real server.
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from prometheus_client import make_asgi_app
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from model.api.adapter_catalog import AdapterCatalog
from model.api.service import Service
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.pipeline.runner import Runner
from model.pipeline.stages import STAGES, Stage
from model.request_fields import GenerationRequest
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.predictions import PREDICT_PATH, TIMEOUT_SECONDS


@contextmanager
def serve_in_process(
    loaded: Loaded,
    limits: Limits | None = None,
    log_prompts: bool = False,
    stages: Sequence[Stage] = STAGES,
    catalog: AdapterCatalog | None = None,
) -> Iterator[httpx.Client]:
    """Return a client of a server of this release."""
    scheduler = Scheduler([Runner(loaded.model, stages)], limits or Limits(), lambda: None)
    service = Service([loaded.summary], scheduler, ColdStart(), log_prompts, catalog)

    async def predict(http: Request) -> Response:
        try:
            request = GenerationRequest.model_validate(await http.json())
        except ValidationError as error:
            problems = (f"`{'.'.join(map(str, one['loc']))}`: {one['msg']}." for one in error.errors())
            return JSONResponse({"error": "\n".join(problems)}, 400)  # as Truss answers
        answer: Any = await service.answer(request, http)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    routes = [Route(PREDICT_PATH, predict, methods=["POST"]), Mount("/metrics", make_asgi_app())]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_SECONDS) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()
            scheduler.close()
