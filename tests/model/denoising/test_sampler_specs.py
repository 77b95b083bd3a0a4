"""The table of samplers is the only place that knows samplers by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.denoising import sampler_specs as specs
from model.denoising.samplers import sampler_schedule, served_samplers
from tests.support.repository import PACKAGES, REPOSITORY
from tests.support.schedulers import EDM_SCHEDULERS, read_edm_schedule, read_noise_schedule
from training.architecture import SCHEDULER as SDXL

NAMES = set(specs.SAMPLERS)
ROWS = {name for name, value in vars(specs).items() if isinstance(value, specs.SamplerSpec)}
SETTINGS = ("scheduler", "sampler")  # the entries of settings that hold a sampler's name


def find_special_cases(source: str) -> Iterator[int]:
    """Yield the lines that compare, list or look up a sampler's name, or compare a row.

    Other uses are values: defaults of fields, arguments, and entries `scheduler` of settings.
    """
    for node in ast.walk(ast.parse(source)):
        operands: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            operands = [*node.elts]
        elif isinstance(node, ast.Dict):
            keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
            values = (value for key, value in zip(keys, node.values, strict=True) if key not in SETTINGS)
            operands = [*node.keys, *values]
        elif isinstance(node, ast.Subscript):
            operands = [node.slice]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # .get, .startswith
            operands = [*node.args]
        for operand in operands:
            is_name = isinstance(operand, ast.Constant) and operand.value in NAMES
            row = operand.attr if isinstance(operand, ast.Attribute) else getattr(operand, "id", None)
            if is_name or (isinstance(node, ast.Compare) and row in ROWS):
                yield node.lineno


def test_only_the_table_knows_samplers_by_name() -> None:
    table = Path(str(specs.__file__))
    files = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py") if path != table]
    found = {f"{path}:{line}" for path in files for line in find_special_cases(path.read_text())}
    assert len(files) > 200 and not found


@pytest.mark.parametrize(
    ("source", "is_special"),
    [
        ('sampler == "Heun"', True),
        ('name in ("Euler", "Euler a")', True),
        ('build = {"LCM": 3}', True),
        ('nearest = {"PNDMScheduler": "Euler"}', True),
        ('limits["Heun"]', True),
        ('limits.get("LCM", 100)', True),
        ('match name:\n    case "DDIM":\n        pass', True),
        ("spec is specs.HEUN", True),
        ("spec is HEUN", True),
        ("spec.order == 2", False),
        ('scheduler: str = "Euler"', False),
        ('{"scheduler": "LCM", "num_inference_steps": 4}', False),
        ('params(scheduler="Euler a")', False),
        ('nearest = {"PNDMScheduler": specs.EULER}', False),
    ],
)
def test_finds_a_special_case(source: str, is_special: bool) -> None:
    assert any(find_special_cases(source)) == is_special


def test_schedules_have_the_facts_of_the_table() -> None:
    for name, spec in specs.SPECS.items():
        schedule = sampler_schedule(name, 4, read_noise_schedule(SDXL))
        assert (schedule.sampler, schedule.order) == (name, spec.order)
        assert schedule.steps == 1 + 3 * spec.order and bool(schedule.draws_noise.any()) == spec.draws_noise


def test_edm_models_serve_the_samplers_with_a_class_of_theirs() -> None:
    schedule = read_edm_schedule({"_class_name": "EDMEulerScheduler"})
    assert served_samplers(schedule) == tuple(name for name in specs.SAMPLERS if name in EDM_SCHEDULERS)
    assert served_samplers(read_noise_schedule(SDXL)) == specs.SAMPLERS
