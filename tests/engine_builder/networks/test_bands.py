"""UNets that compute bands of an image: run together, they compute what the whole UNet computes."""

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_builder.backends.aot_inductor.compile import build_target, engine_key, example_inputs, static_bucket
from engine_builder.building.band_engine import BandEngine
from engine_builder.building.build_plan import BuildPlan, Size, SizesRefused
from engine_builder.building.eager_engine import EagerEngine
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.random_models import make_network
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.networks.unet import StepUnet
from model.engines import row_exchange
from model.errors import EngineError
from model.pipeline.spec import UNET
from model.store.precision import FP32
from model.validation import BAND_COUNTS
from tests.support.repository import MODEL_FOLDER


@functools.cache
def unet_of(bands: int) -> Network:
    return load_network(Checkpoint(MODEL_FOLDER), f"{UNET}_{bands}_bands", FP32, text_chunks=None)


def engine_of(network: Network) -> EagerEngine:
    return EagerEngine(network.component, network.module, network.signature)


def band_engine(network: Network, count: int) -> BandEngine:
    return BandEngine([engine_of(network) for _ in range(count)])


@torch.inference_mode()
def run_whole(network: Network, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the noise of the whole image."""
    with plain_operations():
        [whole] = network.module(*(inputs[spec.name] for spec in network.signature.inputs))
    return whole


@pytest.mark.parametrize("count", BAND_COUNTS)
@torch.inference_mode()
def test_bands_compute_the_whole_image(count: int) -> None:
    unet = unet_of(count)
    assert unet.multiple is not None
    inputs = example_inputs(unet.signature, 2, unet.multiple, unet.multiple + 32, "cpu")
    noise = band_engine(unet, unet.bands).run(inputs)["noise"]
    torch.testing.assert_close(noise, run_whole(unet, inputs), atol=3e-5, rtol=0)


def test_bands_have_the_weights_of_the_whole_unet() -> None:
    """So a GPU has them once. In half precision on GPUs, SDXL's wide convolutions are Winograd's."""
    with torch.device("meta"):
        modules = [StepUnet(make_network(UNET), use_winograd=True, bands=bands) for bands in (1, 2)]
    whole, band = ({name: weight.shape for name, weight in each.named_parameters()} for each in modules)
    assert whole == band and sum(len(shape) == 3 for shape in band.values()) == 27


class Unconnected:
    """The first band, with nothing but its own rows. Implements `model.engines.row_exchange.Bands`."""

    index = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack([own] * self.count)


@torch.inference_mode()
def test_a_band_needs_the_others() -> None:
    unet = unet_of(2)
    inputs = example_inputs(unet.signature, 1, 128, 64, "cpu")
    with row_exchange.joined(Unconnected(2)):
        noise = engine_of(unet).run(inputs)["noise"]
    assert (noise - run_whole(unet, inputs))[:, :, :8].abs().max() > 1e-2
    with pytest.raises(EngineError, match="this is one rank"):
        engine_of(unet).run(inputs)
    with pytest.raises(EngineError, match="this is 4 ranks"):
        band_engine(unet, 4).run(inputs)


def test_the_error_of_a_band_is_raised() -> None:
    unet = unet_of(2)

    class Broken(EagerEngine):
        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            raise EngineError("broken", "")

    broken = Broken(unet.component, unet.module, unet.signature)
    with pytest.raises(EngineError, match="broken"):
        BandEngine([engine_of(unet), broken]).run(example_inputs(unet.signature, 1, 128, 64, "cpu"))


def test_engine_keys_depend_on_the_bands(toy_plan: BuildPlan) -> None:
    bucket = static_bucket(1, 256, 256)
    keys = {engine_key(replace(unet_of(2), bands=bands), toy_plan.target, bucket) for bands in (1, 2, 4)}
    assert len(keys) == 3


def test_a_plan_builds_the_sizes_that_its_bands_divide(toy_plan: BuildPlan) -> None:
    odd = Size(1, 64 + toy_plan.base.size_step(), 64)
    even = Size(1, 64, 64)

    def names(*sizes: Size, bands: tuple[int, ...]) -> list[str]:
        plan = replace(toy_plan, sizes=sizes, bands=bands)
        return [name for name in plan.components if name.endswith("_bands")]

    assert names(bands=(2, 4)) == ["unet_2_bands", "unet_4_bands"]
    assert names(even, Size(1, 128, 64), bands=(4,)) == ["unet_4_bands"] and names(even, bands=()) == []
    plan = replace(toy_plan, sizes=(even, odd), bands=(2,))
    [bucket] = plan.buckets_of(plan.load("unet_2_bands", ModuleReader()))
    assert bucket.height is not None and bucket.height.max == 64
    with pytest.raises(SizesRefused, match="divided into 2 bands"):
        replace(plan, sizes=(odd,)).check_sizes()
    tiny = BuildPlan("tiny", Checkpoint(MODEL_FOLDER), None, build_target(), FP32, bands=(8,))
    with pytest.raises(SizesRefused, match="8 bands need heights in steps of 256"):
        tiny.check_sizes()
