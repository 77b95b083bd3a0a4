"""A release in memory, as the pipeline uses it."""

from dataclasses import dataclass, field

import torch

from model.cuda.streams import SideStream
from model.denoising.eager_loop import EagerLoop
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import Loop
from model.denoising.noise_schedule import NoiseSchedule
from model.engines import components
from model.engines.engine import EngineSet
from model.pipeline.tokenizer import ClipTokenizer
from model.store.manifest import ModelFacts


@dataclass
class LoadedModel:
    """Engines by component, tokenizers, noise schedules and facts of a release, and the denoising loops made so far."""

    engines: dict[str, EngineSet]
    tokenizers: dict[str, ClipTokenizer]
    noise_schedules: dict[str, NoiseSchedule]
    settings: ModelFacts
    device: torch.device
    shares_text_encoder_2: bool = False
    """True if the refiner's text encoder has the base's weights, so that the base's engines serve both."""
    loops: dict[tuple[str, int, int], Loop] = field(default_factory=dict)
    efficient_pixels: int | None = None
    """Pixels per step from which `efficient_batch` is derived for sizes that the warm-up did not measure."""
    text_stream: SideStream = field(init=False)
    first_text_stream: SideStream = field(init=False)
    decode_stream: SideStream = field(init=False)
    """CUDA streams of text encoding (the first text encoder has its own) and decoding. An engine must always run on
    the same stream."""

    def __post_init__(self) -> None:
        self.text_stream, self.first_text_stream = SideStream(self.device), SideStream(self.device)
        self.decode_stream = SideStream(self.device)

    def loop(self, component: str, height: int, width: int) -> Loop:
        """The one loop of that UNet and size (pixels), made at its first use and kept for its buffers and graphs."""
        key = (component, height, width)
        if key not in self.loops:
            loop = self.loops[key] = make_loop(self, component, height, width)
            if self.efficient_pixels is not None:
                loop.efficient_batch = min(loop.capacity, max(1, self.efficient_pixels // (height * width)))
        return self.loops[key]


def make_loop(model: LoadedModel, component: str, height: int, width: int) -> Loop:
    """Make a loop for `component`, one of the UNets, at a size in pixels, in the implementation that fits."""
    unet = model.engines[component]
    if model.device.type == "cuda" and unet.is_static(height, width):
        names = components.CFG_VARIANTS if component == components.UNET else ()
        variants = {name: model.engines[name].of_size(height, width) for name in names if name in model.engines}
        unconditional = variants.get(components.UNET_UNCONDITIONAL, [])
        return GraphLoop(unet, height, width, model.device, unconditional, variants.get(components.UNET_GUIDED, []))
    return EagerLoop(unet, height, width)
