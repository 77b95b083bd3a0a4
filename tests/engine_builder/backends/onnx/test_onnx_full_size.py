"""The graphs of SDXL base 1.0 and refiner 1.0 at full size, exported from their configs and checked.

An export needs shapes only, so no weights are made. It takes minutes, but little memory.
"""

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable

import onnx
import pytest
import torch

from engine_builder.backends.onnx.export_graph import export_graph, read_literals
from engine_builder.backends.onnx.opsets import OLD_OPSET, OPSET
from engine_builder.checkpoints import random_models
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_network
from model.pipeline.spec import REFINER_TEXT_ENCODER_2, TEXT_ENCODER, TEXT_ENCODER_2, UNET, VAE_DECODER
from model.store.precision import FP16
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS

pytestmark = pytest.mark.skipif(
    not os.environ.get("PREHEAT_SLOW"),
    reason="exports SDXL at full size, about five minutes: run `make slow`, which sets PREHEAT_SLOW",
)
# The refiner's text encoder is the base's second.
COMPONENTS = [name for name in BASE_COMPONENTS + REFINER_COMPONENTS if name != REFINER_TEXT_ENCODER_2]
CASES = [(name, OPSET) for name in COMPONENTS] + [(name, OLD_OPSET) for name in (TEXT_ENCODER_2, UNET, VAE_DECODER)]
# Attentions, group norms and layer norms. The first encoder's last layer is not used.
FUSED = {
    "text_encoder": (11, 0, 22),
    "text_encoder_2": (32, 0, 65),
    "unet": (140, 46, 210),
    "refiner_unet": (88, 56, 132),
    "vae_decoder": (1, 30, 0),
}
# Parameters of the published checkpoints, to check the configs.
PARAMETERS = {
    "unet": 2_567_463_684,
    "refiner_unet": 2_259_526_660,
    "text_encoder": 123_060_480,
    "text_encoder_2": 694_659_840,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Checkpoint]:
    """Folders with configs only: the base's (False) and the refiner's (True)."""
    root = tmp_path_factory.mktemp("sdxl")
    with torch.device("meta"):
        all_networks = {name: random_models.make_network(name) for name in random_models.CONFIGS}
    for name, network in all_networks.items():
        counted = PARAMETERS.get(name)
        assert counted is None or sum(parameter.numel() for parameter in network.parameters()) == counted
    base = {name: network for name, network in all_networks.items() if name != "refiner_unet"}
    refiner = {"unet": all_networks["refiner_unet"], **{name: base[name] for name in ("vae", "text_encoder_2")}}
    for model, networks in (("base", base), ("refiner", refiner)):
        for subfolder, network in networks.items():
            folder = root / model / subfolder
            if subfolder in ("vae", "unet"):
                network.save_config(folder)
            else:
                # The checkpoints have 2, for which transformers uses the largest id instead.
                config = network.config.to_dict() | {"eos_token_id": 2}
                folder.mkdir(parents=True)
                (folder / "config.json").write_text(json.dumps(config))
    return {False: Checkpoint(root / "base"), True: Checkpoint(root / "refiner")}


@pytest.mark.parametrize(("component", "opset"), CASES)
def test_sdxl_exports_at_full_size(
    component: str, opset: int, folders: dict[bool, Checkpoint], show_progress: Callable[[str], None]
) -> None:
    started = time.perf_counter()
    network = load_network(folders[component in REFINER_COMPONENTS], component, FP16, device="meta")
    graph = export_graph(network, opset)  # checks it: ONNX's checker, strict shape inference, names, types
    seconds = time.perf_counter() - started
    tensors = network.tensors()
    assert graph.constants.keys() <= tensors.keys()
    if component != TEXT_ENCODER:  # its last layer is not used
        assert graph.constants.keys() == tensors.keys()
    # Everything is fp16, except positions and the sinusoids of time and size.
    assert all(c["dtype"] == "float16" or name.endswith("position_ids") for name, c in graph.constants.items())
    counts = Counter(node.op_type for node in onnx.load_from_string(graph.model).graph.node)
    assert counts.get("Cast", 0) <= 3 and counts.get("Shape", 0) <= 11
    group_norm = "InstanceNormalization" if opset == OLD_OPSET else "GroupNormalization"
    fused = tuple(counts.get(name, 0) for name in ("Softmax", group_norm, "LayerNormalization"))
    assert fused == FUSED.get(component, (0, 0, 0))
    assert len(graph.model) < 2**20
    assert sum(value.nbytes for value in read_literals(graph.model).values()) < 2**14
    assert onnx.load_from_string(graph.model).opset_import[0].version == opset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    show_progress(
        f"{component}, opset {opset}: {seconds:.0f} s, {len(graph.model) / 2**10:.0f} KiB, {counts.total()} nodes, "
        f"{len(graph.constants)} tensors, {peak:.0f} MiB of memory at most so far"
    )
