"""The forms in which an adapter's change of a tensor is stored: their parts, and what the parts make.

A change is scale * D, for a difference D of the tensor's shape. D is a matrix, or is made of two. A matrix is stored
in full, or as two factors. Parts have names: "full", or "down" and "up", after the matrix's prefix. The gain of (IA)3
and the magnitude of DoRA are vectors beside them; see `model.adapters.changes`. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
FormName = Literal["matrix", "hadamard", "kronecker", "gain"]
MAGNITUDE, GAIN = "magnitude", "gain"
MAX_RANK = 1024
FACTORS = frozenset({"down", "up"})
"""The parts of a plain LoRA."""


@dataclass(frozen=True)
class Form:
    """What a form's matrices make, from their shapes and from the matrices themselves."""

    prefixes: tuple[str, ...]
    shape: Callable[..., Shape | None]
    difference: Callable[..., Any]


def _same(first: Shape, second: Shape) -> Shape | None:
    return first if first == second else None


def _kronecker_shape(outer: Shape, inner: Shape) -> Shape | None:
    if len(outer) != 2 or len(inner) < 2:
        return None
    return (outer[0] * inner[0], outer[1] * inner[1], *inner[2:])


def _kronecker(outer: Any, inner: Any) -> Any:
    blocks = outer.reshape(outer.shape[0], 1, outer.shape[1], 1, *(1,) * (inner.ndim - 2)) * inner[None, :, None]
    return blocks.reshape(_kronecker_shape(tuple(outer.shape), tuple(inner.shape)))


FORMS: Mapping[str, Form] = {
    "matrix": Form(("",), lambda one: one, lambda one: one),  # LoRA, LoCon, full differences
    "hadamard": Form(("1.", "2."), _same, lambda first, second: first * second),  # LoHa
    "kronecker": Form(("1.", "2."), _kronecker_shape, _kronecker),  # LoKr
}
"""Name -> form. "gain" is not among them: its difference is the tensor times the gain."""


def stored_shape(shape: Shape) -> Shape:
    """Return a layer's shape as records have it: of a convolution with a kernel of 1x1 that of a linear."""
    return shape if math.prod(shape[2:]) > 1 else shape[:2]


def check_parts(form: str, shape: Shape, parts: Shapes) -> None:
    """Raise ValueError unless these parts make a change of a tensor of this shape."""
    vectors = {name: parts[name] for name in (MAGNITUDE, GAIN) if name in parts}
    sides = ((shape[0], 1), (1, *shape[1:2]))  # one number for each output, or for each input
    wrong = [name for name, vector in vectors.items() if len(shape) < 2 or vector not in sides]
    if wrong or (GAIN in parts) != (form == GAIN) or (form == GAIN and len(parts) > 1):
        raise ValueError(f"the parts {', '.join(sorted(parts))} make no {form} of the shape {list(shape)}")
    if form == GAIN:
        return
    shapes = [_matrix_shape(parts, prefix) for prefix in FORMS[form].prefixes]
    known = {prefix + role for prefix in FORMS[form].prefixes for role in ("down", "up", "full")} | {MAGNITUDE}
    made = None if None in shapes or parts.keys() - known else FORMS[form].shape(*shapes)
    if made != shape:
        raise ValueError(f"the parts {', '.join(sorted(parts))} make no {form} of the shape {list(shape)}")


def _matrix_shape(parts: Shapes, prefix: str) -> Shape | None:
    """Return the shape of a stored matrix, None if its parts do not make one."""
    full, down, up = (parts.get(prefix + role) for role in ("full", "down", "up"))
    if full is not None:
        return full if down is None and up is None else None
    if down is None or up is None or len(down) < 2 or len(up) != 2 or not down[0] == up[1] <= MAX_RANK:
        return None
    return (up[0], *down[1:])


def element_count(parts: Shapes) -> int:
    """Return the number of elements of all parts."""
    return sum(map(math.prod, parts.values()))
