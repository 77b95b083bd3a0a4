"""What the models of the unrolled pipeline have in common inside of Triton: their components, and merged requests.

A model takes the tensors of all merged requests at once, with the images along the first dimension.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError

from engine_builder.triton_repository.config import TritonConfigError, check_config
from engine_builder.triton_repository.serving.backend import (
    as_triton_error,
    error_response,
    log_failure,
    open_release,
    read_tensor,
    refusal,
    response,
)
from engine_builder.triton_repository.unrolled import (
    END,
    components_of_model,
    texts_of,
    unrolled_models,
)
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.errors import RequestRefused
from model.loading.releases import load_deployment
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest

Tensors = dict[str, torch.Tensor]


class PipelineModel(ABC):
    """Triton's `TritonPythonModel` of one model of the pipeline. Subclasses implement `run`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the components of the model. Raises what Triton reports as the reason why it is unavailable."""
        try:
            self._open(args["model_name"], json.loads(args["model_config"]), args)
        except Exception as error:
            raise as_triton_error(args["model_name"], error) from error

    def _open(self, name: str, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
        store, settings = open_release(args)
        if settings.safety != "off":
            raise TritonConfigError(
                f"PREHEAT_SAFETY is {settings.safety}, and the unrolled pipeline has no safety checker.",
                "Use the loop (`preheat export-triton --loop`), or set PREHEAT_SAFETY=off.",
            )
        self.name = name
        self.manifest = store.read_release(settings.release)
        try:
            steps = int(config["parameters"]["steps"]["string_value"])
        except (KeyError, ValueError) as error:
            raise TritonConfigError(f"config.pbtxt of {name} has no number in its parameter steps.") from error
        expected = unrolled_models(self.manifest, steps)[name]
        check_config(config, expected)
        self.inputs, self.texts = expected.inputs, texts_of(self.manifest)
        components = frozenset(components_of_model(name, self.manifest))
        deployment = replace(Deployment.of(settings), components=components)
        loaded = load_deployment(store, deployment, settings.store_options().cache_folder, ColdStart())
        self.model, self.served = loaded.model, loaded.served
        self.height, self.width = self.served.native_height, self.served.native_width
        self.steps = steps

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run all merged requests at once, and return their responses. After an error each is run alone."""
        try:
            parts = [self._read(request) for request in requests]
            counts = [len(next(iter(part.values()))) for part in parts]
            if len({frozenset(part) for part in parts}) > 1:
                raise TritonConfigError("Merged requests have other optional inputs.")
            with torch.inference_mode():
                device = self.model.device
                merged = {name: torch.cat([part[name].to(device) for part in parts]) for name in parts[0]}
                outputs = self.run(merged)
                divided = {name: torch.split(tensor, counts) for name, tensor in outputs.items()}
                return [
                    response({name: tensors[index].clone() for name, tensors in divided.items()})
                    for index in range(len(requests))
                ]
        except Exception as error:
            if len(requests) > 1:
                log_failure(f"{self.name}, {len(requests)} requests merged", error)
                return [answer for request in requests for answer in self.execute([request])]
            return [error_response(error)]

    def _read(self, request: Any) -> Tensors:
        """Return the inputs that a request has."""
        tensors = {tensor.name: read_tensor(request, tensor.name) for tensor in self.inputs}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @abstractmethod
    def run(self, inputs: Tensors) -> Tensors:
        """Return the outputs of merged requests. All tensors have the images along the first dimension."""

    def check_steps(self, inputs: Tensors) -> None:
        """Raise RequestRefused for steps that do not exist: as indices they would break the process's use of a GPU."""
        last = {"step": self.steps - 1, END: self.steps}
        for name, least in (("step", 0), (END, 1)):
            if name in inputs and not all(least <= step <= last[name] for step in inputs[name].flatten().tolist()):
                raise RequestRefused(name, f"is not {least} to {last[name]}. Pass on what the model before returned.")

    def params(self, **fields: Any) -> GenerationParams:
        """Return the parameters of an image with the pipeline's steps and size. Raises RequestRefused."""
        values: dict[str, Any] = {
            "prompt": "-",
            "use_refiner": False,
            "prompt_syntax": "plain",
            "num_inference_steps": self.steps,
        } | fields
        try:
            return resolve(GenerationRequest(**values), self.served)
        except ValidationError as error:
            raise refusal(error) from error
