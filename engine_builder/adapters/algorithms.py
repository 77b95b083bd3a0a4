"""The algorithms of adapters: the tensors that each of them has for a module, and the change that they make.

After KohakuBlueleaf/LyCORIS (`lycoris/modules`), huggingface/peft (`tuners/lora`, `tuners/loha`, `tuners/lokr`) and
comfyanonymous/ComfyUI (`comfy/weight_adapter`). `engine_builder.adapters.names` gives each tensor its role.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from engine_builder.adapters.bad_adapter import FORMATS, BadAdapter
from engine_builder.adapters.options import Stated
from model.adapters.changes import Change
from model.store.adapter_forms import GAIN, MAGNITUDE, MAX_RANK, check_parts, stored_shape

MAX_SCALE = 1e4  # of alpha / rank; trainers write at most some hundreds
_ALPHA_TOLERANCE = 0.01  # between a tensor, which may be BF16, and PEFT's options
Tensors = Mapping[str, torch.Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm by the roles of its tensors.

    form: of its change. required: the roles that a module must have. optional: those that it may have.
    read: returns the change's parts for a layer of this shape, and the rank; None: it has none.
    """

    title: str
    form: str
    required: frozenset[str]
    optional: frozenset[str]
    read: Callable[[Tensors, Shape], tuple[dict[str, torch.Tensor], int | None]]

    def fits(self, roles: Collection[str]) -> bool:
        """True if these roles are of this algorithm, complete or not."""
        return bool(self.required & set(roles)) and set(roles) <= self.required | self.optional


def _factors(down: torch.Tensor, up: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors as [rank, in, ...] and [out, rank], of a linear or of a convolution, however they were written."""
    if up.ndim > 2 and math.prod(up.shape[2:]) == 1:
        up = up.flatten(1)
    kernel, down = shape[2:], _as_linear(down, shape)
    if down.ndim == 2 and kernel and down.shape[1] % math.prod(kernel) == 0:
        down = down.view(len(down), -1, *kernel)
    return down, up


def _as_linear(matrix: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return a matrix without a kernel of 1x1 that the layer's shape does not have."""
    return matrix.flatten(1) if matrix.ndim > 2 == len(shape) and math.prod(matrix.shape[2:]) == 1 else matrix


def _tucker(core: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two factors of a Tucker decomposition. core: [rank, rank, ...]. down: [rank, in]. up: [rank, out].

    Raises ValueError for other shapes, before a product of them may take gigabytes.
    """
    if down.ndim != 2 or up.ndim != 2 or tuple(core.shape[:2]) != (len(up), len(down)) or max(core.shape) > MAX_RANK:
        raise ValueError("the core does not fit the factors")
    return torch.einsum("ij...,jr->ir...", core.float(), down.float()), up.transpose(0, 1)


def _read_lora(tensors: Tensors, shape: Shape) -> tuple[dict[str, torch.Tensor], int]:
    down, up, rank = tensors["down"], tensors["up"], _rank(tensors["down"])
    if (core := tensors.get("mid")) is not None:
        down, up = _tucker(core, down.flatten(1), up.flatten(1).transpose(0, 1))
    down, up = _factors(down, up, shape)
    return {"down": down, "up": up}, rank


def _read_loha(tensors: Tensors, shape: Shape) -> tuple[dict[str, torch.Tensor], int]:
    parts = {}
    for number in (1, 2):
        up, down = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"]
        if (core := tensors.get(f"hada_t{number}")) is not None:
            down, up = _tucker(core, down, up)
        parts[f"{number}.down"], parts[f"{number}.up"] = _factors(down, up, shape)
    return parts, _rank(tensors["hada_w1_b"])


def _read_lokr(tensors: Tensors, shape: Shape) -> tuple[dict[str, torch.Tensor], int | None]:
    rank = None
    if (outer := tensors.get("lokr_w1")) is None:
        left, right = tensors["lokr_w1_a"], tensors["lokr_w1_b"]
        if left.ndim != 2 or right.ndim != 2 or shape[0] % left.shape[0] or shape[1] % right.shape[1]:
            raise ValueError("the first matrix does not divide the layer")
        outer, rank = left.float() @ right.float(), _rank(right)
    parts = {"1.full": outer}
    kernel = shape[2:]
    if (inner := tensors.get("lokr_w2")) is not None:
        inner = _as_linear(inner, shape)
        parts["2.full"] = inner.view(len(inner), -1, *kernel) if inner.ndim == 2 and kernel else inner
        return parts, rank
    up, down = tensors["lokr_w2_a"], tensors["lokr_w2_b"]
    rank = _rank(down)
    if (core := tensors.get("lokr_t2")) is not None:
        down, up = _tucker(core, down, up)
    parts["2.down"], parts["2.up"] = _factors(down, up, shape)
    return parts, rank


def _read_difference(tensors: Tensors, shape: Shape) -> tuple[dict[str, torch.Tensor], None]:
    return {"full": _as_linear(tensors["diff"], shape)}, None


def _read_gain(tensors: Tensors, shape: Shape) -> tuple[dict[str, torch.Tensor], None]:
    gain = tensors["gain"].flatten()
    return {GAIN: gain[None] if bool(tensors["on_input"].reshape(-1)[:1].any()) else gain[:, None]}, None


def _rank(down: torch.Tensor) -> int:
    return down.shape[0] if down.ndim else 0


_WEIGHTS = frozenset({"alpha", "dora_scale", "magnitude_vector"})
ALGORITHMS = (
    Algorithm("LoRA", "matrix", frozenset({"down", "up"}), frozenset({"mid"}) | _WEIGHTS, _read_lora),
    Algorithm(
        "LoHa", "hadamard", frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),
        frozenset({"hada_t1", "hada_t2"}) | _WEIGHTS, _read_loha,
    ),
    *(
        Algorithm("LoKr", "kronecker", frozenset({*outer, *inner}), more | _WEIGHTS, _read_lokr)
        for outer in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for inner, more in ((("lokr_w2",), frozenset()), (("lokr_w2_a", "lokr_w2_b"), frozenset({"lokr_t2"})))
    ),
    Algorithm("full differences", "matrix", frozenset({"diff"}), frozenset({"alpha"}), _read_difference),
    Algorithm("(IA)3", "gain", frozenset({"gain", "on_input"}), frozenset(), _read_gain),
)  # fmt: skip
VECTORS = {"diff_b": ".bias", "b_norm": ".bias", "w_norm": ".weight"}
"""Roles of differences of vectors -> the end of the layer's name."""
OUTPUT_BIAS = "up_bias"  # a LoRA with biases adds its scale times this to the layer's bias


def find_algorithm(roles: Collection[str], where: str) -> Algorithm:
    """Return the algorithm of a module's tensors. Raises BadAdapter for an incomplete or mixed one."""
    fitting = [algorithm for algorithm in ALGORITHMS if algorithm.fits(roles)]
    whole = next((algorithm for algorithm in fitting if algorithm.required <= set(roles)), None)
    if whole is not None:
        return whole
    if not fitting:
        if set(roles) <= _WEIGHTS:
            raise BadAdapter(f"{where} has no tensors of an algorithm, only {', '.join(sorted(roles))}.")
        titles = sorted({algorithm.title for algorithm in ALGORITHMS if algorithm.required & set(roles)})
        mixed = f" of {' and '.join(titles)}" if titles else ""
        raise BadAdapter(
            f"{where} has tensors{mixed} that no algorithm has together: {', '.join(sorted(roles))}. "
            f"These formats are read: {FORMATS}."
        )
    missing = min((sorted(algorithm.required - set(roles)) for algorithm in fitting), key=len)
    raise BadAdapter(f"{where} has no {missing[0]!r} tensor.")


def read_change(tensors: Tensors, shape: Shape, stated: Stated, where: str) -> Change:
    """Return the change that a module's tensors make to its weight of this shape. Raises BadAdapter.

    stated: what PEFT's options say of the module.
    """
    algorithm = find_algorithm(tensors.keys(), where)
    shape = stored_shape(shape)
    try:
        parts, rank = algorithm.read(tensors, shape)
        for one in [] if rank is None else [rank, *(len(part) for name, part in parts.items() if "down" in name)]:
            if not 1 <= one <= MAX_RANK:
                raise BadAdapter(
                    f"{where} has rank {one}, expected 1 to {MAX_RANK}.", "Train or resize it to a smaller rank."
                )
        parts |= _magnitude(tensors, shape)
        check_parts(algorithm.form, shape, {name: tuple(part.shape) for name, part in parts.items()})
    except (ValueError, RuntimeError, IndexError) as error:  # torch raises RuntimeError for shapes that do not match
        own = {role: list(tensor.shape) for role, tensor in sorted(tensors.items()) if role != "alpha"}
        shapes = ", ".join(f"{role} {found}" for role, found in own.items())
        raise BadAdapter(
            f"{where} has {algorithm.title} tensors of the shapes {shapes}, and the layer's tensor is {list(shape)}. "
            "The adapter is for another model."
        ) from error
    if stated.is_decomposed and MAGNITUDE not in parts:
        raise BadAdapter(f"{where} has no magnitude, and PEFT's option use_dora is true.")
    check_finite(parts, where)
    if rank is None and algorithm.form != "kronecker":
        return Change(algorithm.form, parts, 1.0)
    return Change(algorithm.form, parts, _scale(tensors.get("alpha"), stated, rank, where))


def check_finite(parts: Tensors, where: str) -> None:
    """Raise BadAdapter for NaN and infinity."""
    for name, part in parts.items():
        if not bool(torch.isfinite(part).all()):
            raise BadAdapter(f"{where}: the {name!r} tensor has NaN or infinite values.")


def _magnitude(tensors: Tensors, shape: Shape) -> dict[str, torch.Tensor]:
    """Return DoRA's magnitude, [out, 1] or [1, in]. PEFT's is of the outputs, [out] or [1, out, 1, 1]."""
    if (vector := tensors.get("magnitude_vector")) is not None:
        return {MAGNITUDE: vector.reshape(-1, 1)}
    if (vector := tensors.get("dora_scale")) is None:
        return {}
    is_of_inputs = vector.ndim > 1 and vector.shape[0] == 1 and shape[0] != 1
    return {MAGNITUDE: vector.reshape(1, -1) if is_of_inputs else vector.reshape(-1, 1)}


def _scale(alpha: torch.Tensor | None, stated: Stated, rank: int | None, where: str) -> float:
    """Return alpha / rank, of the file's own alpha or PEFT's options. Without either, or without a rank, it is 1."""
    if rank is None:
        if stated.alpha is None or not stated.rank:
            return 1.0
        rank = stated.rank  # PEFT scales also a LoKr of two whole matrices
    if stated.rank not in (None, rank):
        raise BadAdapter(f"{where} has rank {rank}, and PEFT's options state {str(stated.rank)[:40]}.")
    own = None if alpha is None else alpha.item() if alpha.numel() == 1 else math.nan
    values = [value for value in (own, stated.alpha) if value is not None] or [rank]
    for value in values:
        # Compared before the division, which raises OverflowError for a whole number beyond a float's range.
        if not abs(value) <= MAX_SCALE * rank:
            raise BadAdapter(f"{where} has an invalid alpha ({str(value)[:40]}).")
    if not math.isclose(values[0], values[-1], rel_tol=_ALPHA_TOLERANCE):
        raise BadAdapter(f"{where} has alpha {values[0]:g}, and PEFT's options state {values[-1]:g}.")
    # LyCORIS stores an alpha that is scaled for the rank; PEFT's options state the way to scale.
    divisor = math.sqrt(rank) if own is None and stated.is_rank_stabilized else rank
    return values[0] / divisor
