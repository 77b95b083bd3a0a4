"""The optimizer of every training stage: AdamW with a cosine learning rate, averaged weights (EMA) and checkpoints.

A checkpoint is one safetensors file, which is replaced atomically. A run that loads it continues from the same state.
Only the random numbers of later steps differ: they are seeded from the step.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WARM_UP_STEPS = 200


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which networks compute during training: bfloat16 on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class EmaOptimizer:
    """AdamW on float32 copies of the weights, with their exponential moving average.

    The networks are converted to the compute dtype in place. Each update writes the float32 weights into them.

    learning_rate: its maximum, after the warm-up.
    decay: largest decay of the moving average.
    """

    def __init__(self, networks: nn.ModuleDict, steps: int, learning_rate: float, decay: float = 0.999) -> None:
        self.networks, self.steps, self.learning_rate, self.decay = networks, steps, learning_rate, decay
        self.step, self.seconds = 0, 0.0  # steps done, and the time that they took
        named = [(name, p) for name, p in networks.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.weights = [p.detach().float().clone() for p in self.parameters]
        self.averages = [p.clone() for p in self.weights]
        networks.to(compute_dtype(self.parameters[0].device))
        matrices = [p for p in self.weights if p.ndim > 1]
        vectors = [p for p in self.weights if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99), fused=self.weights[0].is_cuda)

    def update(self, loss: Tensor) -> None:
        """Do one optimizer step with the gradient of `loss`."""
        loss.backward()
        with_grad = [(w, p) for w, p in zip(self.weights, self.parameters, strict=True) if p.grad is not None]
        grads = [torch.empty_like(weight) for weight, _ in with_grad]
        torch._foreach_copy_(grads, [parameter.grad for _, parameter in with_grad])
        for (weight, parameter), grad in zip(with_grad, grads, strict=True):
            weight.grad, parameter.grad = grad, None
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate * self._learning_rate_factor()
        self.adamw.step()
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.weights, 1 - decay)
            torch._foreach_copy_(self.parameters, self.weights)

    def _learning_rate_factor(self) -> float:
        """Linear warm-up, then half a cosine down to 1 %."""
        warm_up = min(1.0, (self.step + 1) / min(WARM_UP_STEPS, max(1, self.steps // 10)))
        return warm_up * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self.steps))))

    def use_averages(self) -> None:
        """Write the averaged weights into the networks, in float32."""
        self.networks.float()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.averages)

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        tensors: dict[str, Tensor] = {"step": torch.tensor(self.step), "seconds": torch.tensor(self.seconds)}
        for name, weight, average in zip(self.names, self.weights, self.averages, strict=True):
            state = self.adamw.state[weight]
            tensors[f"weight/{name}"] = weight
            tensors[f"average/{name}"] = average
            if state:
                tensors[f"first/{name}"] = state["exp_avg"]
                tensors[f"second/{name}"] = state["exp_avg_sq"]
        save_tensors(tensors, path)

    def load(self, path: Path) -> None:
        """Load a checkpoint of the same networks."""
        tensors = load_file(path)
        self.step, self.seconds = int(tensors["step"]), float(tensors["seconds"])
        with torch.no_grad():
            for name, weight, average in zip(self.names, self.weights, self.averages, strict=True):
                weight.copy_(tensors[f"weight/{name}"])
                average.copy_(tensors[f"average/{name}"])
                if f"first/{name}" in tensors:
                    self.adamw.state[weight] = {
                        "step": torch.tensor(float(self.step), device=weight.device if weight.is_cuda else "cpu"),
                        "exp_avg": torch.empty_like(weight).copy_(tensors[f"first/{name}"]),
                        "exp_avg_sq": torch.empty_like(weight).copy_(tensors[f"second/{name}"]),
                    }
            torch._foreach_copy_(self.parameters, self.weights)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically: readers find the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
    os.replace(partial, path)
