"""Adapters of LyCORIS's own modules, with random parameters: their files, and the networks that they change."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lycoris import modules
from safetensors.torch import save_file
from torch import nn

from tests.support.adapters import kohya_stem

_CHANGE = 0.5  # norm of the difference of a weight, as a share of the weight's own
_RANK = 4


ALGORITHMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "locon": ("LoConModule", {}),
    "rslora": ("LoConModule", {"rs_lora": True}),
    "tucker": ("LoConModule", {"use_tucker": True}),
    "loha": ("LohaModule", {}),
    "loha-tucker": ("LohaModule", {"use_tucker": True}),
    "lokr": ("LokrModule", {"factor": 4}),
    "lokr-both": ("LokrModule", {"factor": -1, "decompose_both": True, "lora_dim": 2}),
    "lokr-full": ("LokrModule", {"factor": 4, "full_matrix": True}),
    "lokr-tucker": ("LokrModule", {"factor": 4, "use_tucker": True, "lora_dim": 2}),
    "dora": ("LoConModule", {"weight_decompose": True}),
    "dora-inputs": ("LoConModule", {"weight_decompose": True, "wd_on_out": False}),
    "doha": ("LohaModule", {"weight_decompose": True}),
    "dokr": ("LokrModule", {"factor": 4, "weight_decompose": True}),
    "full": ("FullModule", {}),
    "ia3": ("IA3Module", {}),
    "ia3-inputs": ("IA3Module", {"train_on_input": True}),
}
"""Name -> a class of LyCORIS, and its options."""


class LycorisAdapter:
    """Modules of LyCORIS for some modules of a pipeline's networks."""

    def __init__(self, networks: Mapping[str, nn.Module], pattern: re.Pattern[str], algorithm: str, seed: int) -> None:
        """networks: by component. pattern: of the whole names of the modules to change."""
        kind, options = ALGORITHMS[algorithm]
        options = {"lora_dim": _RANK, "alpha": _RANK / 2} | options
        generator = torch.Generator().manual_seed(seed)
        self._modules: dict[str, Any] = {}
        for component, network in networks.items():
            for name, module in network.named_modules():
                prefix = "text_model." if component != "unet" and name.startswith("encoder.") else ""
                whole = f"{component}.{prefix}{name}"
                if not pattern.fullmatch(whole):
                    continue
                if isinstance(module, nn.Linear | nn.Conv2d):
                    made = getattr(modules, kind)(kohya_stem(whole), module, 1.0, **options)
                elif algorithm == "full" and isinstance(module, nn.GroupNorm | nn.LayerNorm):
                    made = modules.NormModule(kohya_stem(whole), module, 1.0)
                else:
                    continue
                _fill(made, module, generator)
                self._modules[whole] = made
        assert self._modules

    def write(self, path: Path) -> Path:
        """Write the file as a trainer of LyCORIS does. Returns `path`."""
        tensors = {
            f"{made.lora_name}.{key}": tensor.detach().clone().contiguous()
            for made in self._modules.values()
            for key, tensor in _tensors(made).items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
        return path

    @contextmanager
    def applied(self, scale: float) -> Iterator[None]:
        """Run the networks with the adapter."""
        forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        for made in self._modules.values():
            [module] = made.org_module
            forwards.append((module, module.forward))
            made.org_forward, made.multiplier = module.forward, scale
            made.eval()
            module.forward = made.forward
        try:
            yield
        finally:
            for module, forward in reversed(forwards):
                module.forward = forward  # type: ignore[method-assign]


def _tensors(made: Any) -> dict[str, torch.Tensor]:
    """Return what a file has of a module. That of a full difference subtracts the weight once it is applied."""
    if type(made).__name__ == "FullModule":
        return {key: tensor for key, tensor in (("diff", made.weight), ("diff_b", made.bias)) if tensor is not None}
    return dict(made.state_dict())


@torch.no_grad()
def _fill(made: Any, module: nn.Module, generator: torch.Generator) -> None:
    """Draw a LyCORIS module's parameters, so that its difference has the norm `_CHANGE` of the weight's."""
    for name, parameter in made.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name == "dora_scale":
            parameter.mul_(1 + 0.2 * drawn)
        elif type(made).__name__ in ("NormModule", "IA3Module") or name == "bias":
            parameter.copy_(0.4 * drawn)
        else:
            parameter.copy_(drawn)
    if type(made).__name__ in ("NormModule", "IA3Module"):
        return
    if type(made).__name__ == "FullModule":
        difference, scaled = made.weight, made.weight
    elif type(made).__name__ == "LoConModule":
        difference, scaled = made.make_weight() * made.scale, made.lora_up.weight
    else:
        difference = made.get_weight(module.weight.shape)
        names = ("hada_w1_a", "lokr_w1", "lokr_w1_a")
        scaled = next(getattr(made, name) for name in names if hasattr(made, name))
    scaled.mul_(_CHANGE * module.weight.norm() / difference.norm())
