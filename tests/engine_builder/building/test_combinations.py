"""UNets that take several features: which a build has, what they share, and that a broken branch is found."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine_builder.building.build_plan import BuildPlan, CombinationRefused, Size
from engine_builder.building.eager_engine import EagerEngine
from engine_builder.building.real_inputs import Inputs, fit_to_bucket, record_real_inputs
from engine_builder.building.validate import InaccurateEngine, relative_error, tolerance, validate
from engine_builder.checkpoints.folder import Checkpoint, IpAdapterFiles
from engine_builder.networks.network import ModuleReader, Network
from model.engines.features import CONTROL, FEATURES, GUIDED_ZEROS, IMAGE_PROMPT, LORA
from model.loading.target import Target
from model.store.precision import FP32
from preheat.commands.build_arguments import parse_plan
from preheat.main import app
from tests.support import ip_adapters
from tests.support.uncompiled import publish_uncompiled

ALL = "unet.image_prompt.control.lora"


@pytest.fixture(scope="module")
def plan(
    toy_folder: Path, controlnet_folders: dict[str, Path], target: Target, tmp_path_factory: pytest.TempPathFactory
) -> BuildPlan:
    """The toy with a ControlNet, an IP-Adapter and a UNet for adapters."""
    root = tmp_path_factory.mktemp("ip-adapter")
    encoder = ip_adapters.write_encoder(root / "image_encoder")
    style = IpAdapterFiles("style", ip_adapters.write_adapter(root / "style.safetensors", toy_folder), encoder)
    controlnets = (("edges", controlnet_folders["edges"]),)
    base = Checkpoint(toy_folder, controlnets=controlnets, ip_adapters=(style,), ip_images=1)
    return BuildPlan("toy", base, None, target, FP32, lora_rank=4)


def combined(plan: BuildPlan) -> list[str]:
    return [name for name in plan.components if name.startswith("unet.")]


def test_adds_one_unet_with_all_features(plan: BuildPlan) -> None:
    without_prompts = replace(plan, base=replace(plan.base, ip_adapters=()))
    assert combined(plan) == [ALL] and combined(without_prompts) == ["unet.control.lora"]
    for other in (
        replace(plan, lora_rank=0),  # `unet_ip` takes both
        replace(without_prompts, base=replace(without_prompts.base, controlnets=())),
        replace(plan, combine=()),
    ):
        assert not combined(other)
    gpu = replace(plan, target=replace(plan.target, device="cuda"), sizes=(Size(1, 64, 64), Size(2, 64, 64)))
    names = ("unet", "unet_guided", "unet_lora", "unet_lora_guided", "unet_controlled", "unet_ip", ALL)
    assert {name: gpu.engine_count(name) for name in gpu.components if name in names} == dict(
        zip(names, (2, 1, 2, 1, 2, 2, 2), strict=True)
    )


def test_builds_the_combinations_of_the_command(plan: BuildPlan) -> None:
    named = (frozenset({CONTROL, LORA}), frozenset({IMAGE_PROMPT, LORA}))
    assert combined(replace(plan, combine=named)) == ["unet.control.lora", "unet.image_prompt.lora"]
    folder, [(name, controlnet)] = str(plan.base.root), plan.base.controlnets
    options = {"lora_rank": 4, "controlnets": [f"{name}={controlnet}"]}
    for text, names in {
        "all": ["unet.control.lora"],
        "none": [],
        "lora+control": ["unet.control.lora"],
        "control": [],  # built without being named
    }.items():
        assert combined(parse_plan(folder, combine=text, **options)) == names  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora+control", "A UNet with control+lora needs control. This build has lora."),
        ("lora+contrl", "needs contrl. This build has lora."),
        (f"lora+{GUIDED_ZEROS}", f"needs {GUIDED_ZEROS}. This build has lora."),
    ],
)
def test_refuses_features_that_the_build_lacks(text: str, message: str, toy_folder: Path, tmp_path: Path) -> None:
    arguments = ["build", str(toy_folder), "--store", str(tmp_path / "store"), "--lora-rank", "4", "--combine", text]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, CombinationRefused) and message in str(result.exception)
    assert "--controlnet" in str(result.exception) and not list((tmp_path / "store").rglob("*.json"))


def test_a_combined_unet_has_the_weights_of_the_unet(plan: BuildPlan, tmp_path: Path) -> None:
    manifest = publish_uncompiled(plan, tmp_path / "store").read_release("toy/1")
    identities = {record.component: record.identity for record in manifest.weights}
    assert identities[ALL] == identities["unet"] == identities["unet_controlled"]
    keys = [engine.key for engine in manifest.engines if engine.component.startswith("unet")]
    assert len(set(keys)) == len(keys)


@pytest.fixture(scope="module")
def networks(plan: BuildPlan) -> dict[str, Network]:
    reader = ModuleReader()
    both = frozenset({CONTROL, LORA}), frozenset({IMAGE_PROMPT, LORA}), frozenset({IMAGE_PROMPT, CONTROL, LORA})
    of_all = replace(plan, combine=both)
    return {name: of_all.load(name, reader) for name in of_all.components}


@pytest.fixture(scope="module")
def real_inputs(plan: BuildPlan, networks: dict[str, Network]) -> dict[str, list[Inputs]]:
    with torch.inference_mode():
        return record_real_inputs(networks, plan.base, None, "cpu", [(64, 64)])


COMBINED = ("unet.control.lora", "unet.image_prompt.lora", ALL)


class BrokenEngine(EagerEngine):
    """Reads zeros in place of the inputs of a feature."""

    feature = ""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = FEATURES[self.feature].inputs if self.feature else ()
        broken = [name for name in inputs if any(one.matches(name) for one in own)]
        return super().run(dict(inputs) | {name: torch.zeros_like(inputs[name]) for name in broken})


@pytest.mark.parametrize("component", COMBINED)
def test_finds_each_broken_branch(
    component: str, plan: BuildPlan, networks: dict[str, Network], real_inputs: dict[str, list[Inputs]]
) -> None:
    """Also by the recorded inputs alone: each feature changes the result of each of them by more than is allowed."""
    network = networks[component]
    engine = BrokenEngine(component, network.module, network.signature)
    [engine.bucket] = plan.buckets_of(network)
    recorded = fit_to_bucket(real_inputs[component], network, engine.bucket)
    assert recorded
    with torch.inference_mode():
        validate(network, engine, recorded)
        expected = [engine.run(inputs)["noise"] for inputs in recorded]
        for feature in network.module.features:  # type: ignore[union-attr]
            engine.feature = str(feature)
            with pytest.raises(InaccurateEngine, match=f"The {component} engine"):
                validate(network, engine, recorded)
            results = [engine.run(inputs)["noise"] for inputs in recorded]
            errors = [relative_error(*pair) for pair in zip(results, expected, strict=True)]
            assert min(errors) > tolerance(network, "cpu"), feature
