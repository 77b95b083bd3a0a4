"""The deployments: truss accepts their configs, the configs agree, and the image has the files of the server only."""

import ast
import re
import subprocess
import sys
import warnings
from importlib.metadata import packages_distributions, version
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.rows import read_rows
from model.request_fields import GenerationRequest
from model.settings import Limits, read_settings
from preheat.local_server.server import Layout, build_context, lay_out
from tests.support.repository import REPOSITORY

with warnings.catch_warnings(action="ignore"):  # truss's dependencies warn about each other
    from truss.base.truss_config import TrussConfig

PRODUCTION = REPOSITORY / "config.yaml"
CPU_DEMO = REPOSITORY / "truss" / "configs" / "cpu-demo.yaml"
CONFIGS = [PRODUCTION, *sorted((REPOSITORY / "truss" / "configs").glob("*.yaml"))]

# Packages that model/ imports only if a config or an engine names them.
OPTIONAL = {"diffusers", "transformers", "tensorrt"}


def load(path: Path) -> TrussConfig:
    return TrussConfig.from_yaml(path)


def settings(path: Path) -> dict[str, Any]:
    return load(path).model_metadata["preheat"]


def pins(path: Path) -> dict[str, str]:
    """Return the exact version of each requirement. Fails for one that is not pinned."""
    versions = {}
    for line in load(path).requirements:
        if line.startswith("--extra-index-url "):
            continue
        requirement = Requirement(line)
        [specifier] = requirement.specifier
        assert specifier.operator == "==", line
        versions[canonicalize_name(requirement.name)] = specifier.version
    return versions


GPU_CONFIGS = [path for path in CONFIGS if path != CPU_DEMO]
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def test_each_gpu_has_a_config_and_the_cpu_has_one() -> None:
    assert {"cpu-demo", "l4", "a10g", "a100", "h100", "h200"} <= {path.stem for path in CONFIGS}
    assert load(PRODUCTION) == load(REPOSITORY / "truss" / "configs" / "h100.yaml")
    assert not list((REPOSITORY / "truss").rglob("__init__.py"))  # which would hide the truss package


@every_config
def test_truss_runs_the_config(path: Path) -> None:
    """truss knows every key, more requests reach the model than its queue holds, and a stuck replica is restarted."""
    config = load(path)
    config.validate_forbid_extra()
    assert config.python_version == f"py{sys.version_info.major}{sys.version_info.minor}"
    resources = config.resources
    if path == CPU_DEMO:
        assert not resources.use_gpu and resources.accelerator.accelerator is None
    else:
        name = "h100" if path == PRODUCTION else path.stem
        assert resources.use_gpu and resources.accelerator.accelerator.value.lower() == name
    assert config.runtime.predict_concurrency >= 2 * settings(path)["limits"]["max_queue"]
    checks = config.runtime.health_checks
    assert 0 < checks.stop_traffic_threshold_seconds < checks.restart_threshold_seconds
    assert checks.restart_threshold_seconds < checks.startup_threshold_seconds < 1800


@every_config
def test_pins_match_production_and_this_environment(path: Path) -> None:
    production, own = pins(PRODUCTION), pins(path)
    for name in own.keys() - {"torch"}:
        assert own[name] == production[name], name
        if name != "cuda-python":  # not installed where there is no GPU
            assert own[name] == version(name), name
    assert set(production) - set(own) <= ({"cuda-python"} if path == CPU_DEMO else set())
    indexes = [line for line in load(path).requirements if line.startswith("--extra-index-url ")]
    assert [line.rpartition("/")[2] for line in indexes] == [own["torch"].partition("+")[2]]


def test_torch_is_that_of_the_tests_and_of_the_measurements() -> None:
    assert pins(CPU_DEMO)["torch"].partition("+")[0] == version("torch").partition("+")[0]
    rows = [row for file in sorted((REPOSITORY / "docs" / "benchmarks").glob("*.json")) for row in read_rows(file)]
    for path in GPU_CONFIGS:
        torch_pin, cuda = pins(path)["torch"], Version(pins(path)["cuda-python"])
        assert {row.torch for row in rows if row.driver} == {torch_pin}, path
        assert torch_pin.partition("+")[2] == f"cu{cuda.major}{cuda.minor}", path


def test_image_pins_numpy_above_the_servers_limit(layout: Layout) -> None:
    """The server alone requires numpy below 2."""
    lines = (layout.root / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("numpy")] == [f"numpy=={version('numpy')}"]


@every_config
def test_settings_have_the_keys_that_the_model_reads(path: Path) -> None:
    preheat = settings(path)
    keys = {"store", "release", "public_key", "cache_dir", "buckets", "limits", "log_prompts"}
    assert set(preheat) == keys | (set() if path.stem == "cpu-demo" else {"grace_seconds"})
    assert read_settings(preheat).limits == Limits()
    assert preheat["log_prompts"] is False
    assert preheat["store"].startswith("s3://") or path.stem == "cpu-demo"
    assert Path(preheat["cache_dir"]).is_absolute()
    for bucket in preheat["buckets"]:
        assert set(bucket) == {"height", "width", "rows"}
        assert bucket["height"] % 8 == 0 and bucket["width"] % 8 == 0
        assert bucket["rows"] >= 2, "no image with guidance fits"
    assert preheat["buckets"] or path.stem == "cpu-demo"


@every_config
def test_secrets_and_example_are_those_of_the_deployment(path: Path) -> None:
    config, preheat = load(path), settings(path)
    needed = {"aws_access_key_id", "aws_secret_access_key"} if preheat["store"].startswith("s3:") else set()
    assert set(config.secrets) == needed and not any(config.secrets.values())
    example = config.model_metadata["example_model_input"]
    GenerationRequest.model_validate(example)
    sizes = {(bucket["width"], bucket["height"]) for bucket in preheat["buckets"]}
    assert not sizes or (example["width"], example["height"]) in sizes


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_context(REPOSITORY, REPOSITORY / "truss" / "configs" / "l4.yaml", tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def layout(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return lay_out(context, tmp_path_factory.mktemp("root"))


def test_upload_has_the_model_and_its_config_only(context: Path) -> None:
    upload = context.parent / "upload"
    assert {path.name for path in upload.iterdir()} <= {"config.yaml", "model", "packages"}
    assert not list(upload.rglob("__pycache__"))
    assert sum(path.stat().st_size for path in upload.rglob("*") if path.is_file()) < 4 << 20


def test_image_has_all_of_model_and_no_other_code(layout: Layout) -> None:
    modules = {path.relative_to(REPOSITORY / "model") for path in (REPOSITORY / "model").rglob("*.py")}
    assert modules == {path.relative_to(layout.app / "model") for path in (layout.app / "model").rglob("*.py")}
    names = {part for path in layout.root.rglob("*") for part in path.relative_to(layout.root).parts}
    assert not names & {
        "engine_builder",
        "gateway",
        "benchmarks",
        "preheat",
        "training",
        "tests",
        "docs",
        ".git",
        ".venv",
        ".preheat",
        "tiny-sdxl",
    }
    assert not [path for path in layout.root.rglob("*") if path.suffix in (".safetensors", ".pt2", ".plan")]


def test_image_has_the_requested_config(layout: Layout) -> None:
    assert layout.config["resources"]["accelerator"] == "L4"
    assert layout.config["model_metadata"]["preheat"] == settings(REPOSITORY / "truss" / "configs" / "l4.yaml")


def test_image_has_what_model_imports(layout: Layout) -> None:
    lines = (layout.root / "requirements.txt").read_text().splitlines()
    required = [line for line in lines if line and line[0] not in "#-"]
    installed = {canonicalize_name(re.split(r"[<>=\[ ;]", line)[0]) for line in required}
    # Modules that another distribution requires, and cuda, which is installed only on machines with a GPU.
    known = {"starlette": "fastapi", "h11": "uvicorn", "pydantic_core": "pydantic", "annotated_types": "pydantic",
             "typing_extensions": "pydantic", "botocore": "boto3", "cuda": "cuda-python"}  # fmt: skip
    distributions = packages_distributions()
    for path in (REPOSITORY / "model").rglob("*.py"):
        for name in third_party_imports(path) - OPTIONAL:
            provided_by = {canonicalize_name(d) for d in [known.get(name, name), *distributions.get(name, [])]}
            assert provided_by & installed, f"{path.relative_to(REPOSITORY)} imports {name}, which no config requires"


def third_party_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"model"}


def test_image_has_bytecode(layout: Layout) -> None:
    """uv, which installs the image's packages, compiles none. The command runs here on the files of the image."""
    [command] = load(PRODUCTION).build_commands
    assert all(load(path).build_commands == [command] for path in CONFIGS)
    here = command.replace("/app", str(layout.app)).replace("python3", sys.executable)
    packages = re.search(r'"\$\(.*?\)"', here)
    assert packages is not None
    printed = subprocess.run(
        ["sh", "-c", f"echo {packages.group()}"], capture_output=True, text=True, check=True
    ).stdout
    assert Path(printed.strip()) == Path(torch.__file__).parents[1]
    subprocess.run(["sh", "-c", here.replace(packages.group(), "")], check=True)
    sources = [source for source in layout.app.rglob("*.py")]
    assert sources and all(Path(cache_from_source(str(source))).exists() for source in sources)
