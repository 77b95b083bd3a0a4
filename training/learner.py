"""What every stage of the training shares: AdamW with a cosine rate, an average of the weights (EMA), checkpoints.

A checkpoint is one safetensors file, replaced atomically; loading it goes on exactly where it was saved, except
for the random draws of the steps since, which are seeded anew from the step.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WARM_UP = 200  # steps


def precision(device: torch.device) -> torch.dtype:
    """What networks compute in while they learn: bfloat16 on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Learner:
    """Trains `networks`, which it turns to the device's precision; the weights themselves stay float32 here."""

    def __init__(self, networks: nn.ModuleDict, steps: int, rate: float, average: float = 0.999) -> None:
        self.networks, self.steps, self.rate, self.average = networks, steps, rate, average
        self.step, self.seconds = 0, 0.0  # spent on the steps so far
        named = [(name, p) for name, p in networks.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.weights = [p.detach().float().clone() for p in self.parameters]
        self.averaged = [p.clone() for p in self.weights]
        networks.to(precision(self.parameters[0].device))
        decayed = [p for p in self.weights if p.ndim > 1]
        rest = [p for p in self.weights if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        cuda = self.weights[0].is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=cuda)

    def update(self, loss: Tensor) -> None:
        """One optimizer step down the gradient of `loss`."""
        loss.backward()
        used = [(w, p) for w, p in zip(self.weights, self.parameters, strict=True) if p.grad is not None]
        grads = [torch.empty_like(weight) for weight, _ in used]
        torch._foreach_copy_(grads, [parameter.grad for _, parameter in used])
        for (weight, parameter), grad in zip(used, grads, strict=True):
            weight.grad, parameter.grad = grad, None
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._rate_share()
        self.optimizer.step()
        self.step += 1
        decay = min(self.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self.averaged, self.weights, 1 - decay)
            torch._foreach_copy_(self.parameters, self.weights)

    def _rate_share(self) -> float:
        warm = min(1.0, (self.step + 1) / min(WARM_UP, max(1, self.steps // 10)))
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self.steps))))

    def use_average(self) -> None:
        """Puts the averaged weights, in float32, into the networks."""
        self.networks.float()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.averaged)

    def save(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {"step": torch.tensor(self.step), "seconds": torch.tensor(self.seconds)}
        for name, weight, averaged in zip(self.names, self.weights, self.averaged, strict=True):
            state = self.optimizer.state[weight]
            tensors[f"weight/{name}"] = weight
            tensors[f"average/{name}"] = averaged
            if state:
                tensors[f"first/{name}"] = state["exp_avg"]
                tensors[f"second/{name}"] = state["exp_avg_sq"]
        write(tensors, path)

    def load(self, path: Path) -> None:
        tensors = load_file(path)
        self.step, self.seconds = int(tensors["step"]), float(tensors["seconds"])
        with torch.no_grad():
            for name, weight, averaged in zip(self.names, self.weights, self.averaged, strict=True):
                weight.copy_(tensors[f"weight/{name}"])
                averaged.copy_(tensors[f"average/{name}"])
                if f"first/{name}" in tensors:
                    self.optimizer.state[weight] = {
                        "step": torch.tensor(float(self.step), device=weight.device if weight.is_cuda else "cpu"),
                        "exp_avg": torch.empty_like(weight).copy_(tensors[f"first/{name}"]),
                        "exp_avg_sq": torch.empty_like(weight).copy_(tensors[f"second/{name}"]),
                    }
            torch._foreach_copy_(self.parameters, self.weights)


def write(tensors: dict[str, Tensor], path: Path) -> None:
    """Atomically: a reader finds the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part)
    os.replace(part, path)
