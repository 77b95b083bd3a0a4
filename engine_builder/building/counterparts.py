"""The networks of a plan and the libraries' own with the same weights, which the build compares."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.float_arithmetic import stored_types
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.networks.wrappers import WRAPPERS
from model.engines.shapes import DTYPES
from model.pipeline.components import FAMILIES, find_component
from model.pipeline.spec import ComponentSpec, model_parts
from model.store.precision import FP32, Precision, StorageDtype

# Largest relative error (norm of the difference over norm of the reference), by the type of the stored weights. The
# wrappers store sums of some convolutions' weights (`subpixel_upsample`), which are rounded to that type.
LIMITS: dict[StorageDtype, float] = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass
class Counterparts:
    """The networks of a plan without kernels and quantization, and the libraries' own, with shared weights.

    Each is loaded when it is first asked for. Networks of an image are kept. Of the other networks, of which a GPU has
    many, only the last is kept.
    """

    plan: BuildPlan
    _readers: dict[Path | None, ModuleReader] = field(default_factory=dict)
    _networks: dict[str, Network] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.plan.network_device

    @property
    def of_image(self) -> list[str]:
        """The components that generate an image without ControlNets, adapters and IP-Adapters."""
        plan = self.plan
        return [spec.name for spec in FAMILIES[plan.base.family].specs(*model_parts(plan.refiner is not None))]

    def ours(self, component: str) -> Network:
        """Return a component's wrapper, with inputs and outputs in float32. Raises CheckpointError."""
        if component not in self._networks:
            for other in self._networks.keys() - set(self.of_image):
                del self._networks[other]
            spec = find_component(component)
            checkpoint = self.plan.checkpoint_of(component)
            with stored_types():
                self._networks[component] = load_network(
                    checkpoint, component, self._precision(spec), self.device, self._reader(checkpoint, spec),
                    plain=True, lora_rank=self.plan.lora_rank, text_chunks=None,
                )  # fmt: skip
        return self._networks[component]

    def library(self, component: str) -> Any:
        """Return a new module of the library for a component's network, which the caller may change."""
        spec = find_component(component)
        checkpoint, wrapper = self.plan.checkpoint_of(component), WRAPPERS[spec.wrapper]
        class_name = wrapper.class_of(checkpoint.config(spec.checkpoint_folder))
        dtype = DTYPES[self._precision(spec).storage]
        reader = self._reader(checkpoint, spec)
        with stored_types():
            module = reader.read(wrapper.package, class_name, checkpoint, spec.checkpoint_folder, dtype)
            return nn.Module.to(module, self.device).eval().requires_grad_(False)

    def run(self, component: str, **inputs: Tensor) -> dict[str, Tensor]:
        """Run a component's wrapper. Returns its outputs by name."""
        network = self.ours(component)
        outputs = network.module(*(inputs[spec.name] for spec in network.signature.inputs))
        return {spec.name: tensor for spec, tensor in zip(network.signature.outputs, outputs, strict=True)}

    def limit(self, component: str) -> float:
        """Return the largest relative error of a component."""
        return LIMITS[self._precision(find_component(component)).storage]

    @property
    def storage(self) -> StorageDtype:
        """The type of the stored weights, without quantization."""
        return self.plan.precision.unquantized.storage

    def _precision(self, spec: ComponentSpec) -> Precision:
        # A VAE is small, and diffusers would convert one in fp16 (force_upcast).
        return FP32 if spec.precision_rule == "vae" else replace(FP32, storage=self.storage)

    def _reader(self, checkpoint: Checkpoint, spec: ComponentSpec) -> ModuleReader:
        of_image = spec.name in self.of_image or spec.checkpoint_folder == "unet"
        folder = checkpoint.folder(spec.checkpoint_folder) if of_image else None
        change = self.plan.merge.change if self.plan.merge else None
        return self._readers.setdefault(folder, ModuleReader(change))
