"""A release in memory, as the pipeline uses it."""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

from model.adapters.layers import AdapterSet
from model.adapters.library import AdapterLibrary
from model.cuda.streams import SideStream
from model.denoising.cover import Option, scaled
from model.denoising.eager_loop import EagerLoop
from model.denoising.edm_schedule import AnyNoiseSchedule
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import Loop
from model.denoising.networks import Denoiser
from model.denoising.ranks import ALONE, Ranks
from model.engines.engine import EngineSet
from model.engines.signatures import text_chunks
from model.pipeline.components import COMPONENTS
from model.pipeline.denoisers import StepEngines, find_denoiser
from model.pipeline.spec import Components, Family, controlnets_of
from model.prompts.tokenizer import ClipTokenizer
from model.store.manifest import Bucket, Fp16Steps, ModelFacts

Result = TypeVar("Result")
LoopKey = tuple[str, int, int]
"""The UNet of a loop, by name, and its height and width in pixels."""


@dataclass
class LoadedModel:
    """The engines, tokenizers, noise schedules and facts of a release by name, and the denoising loops made so far.

    `fp16_engines`: by name, the UNets and their variants in fp16, if `engines` has them in 8 bits. They run the
    `fp16_steps`, in the same loops, and the images of `in_fp16`. Those images may also need the VAE decoder in fp16.
    """

    engines: dict[str, EngineSet]
    tokenizers: dict[str, ClipTokenizer]
    noise_schedules: dict[str, AnyNoiseSchedule]
    settings: ModelFacts
    device: torch.device
    family: Family
    fp16_engines: dict[str, EngineSet] = field(default_factory=dict)
    fp16_steps: Fp16Steps = Fp16Steps()
    quantized: frozenset[str] = frozenset()
    """The names in `engines` whose weights are quantized."""
    components: Components = field(default_factory=lambda: COMPONENTS)
    loops: dict[LoopKey, Loop] = field(default_factory=dict)
    blanks_flagged: bool = False
    """True: images that the safety checker flags are replaced by black ones."""
    adapters: AdapterLibrary | None = None
    """The adapters that requests may name; None: requests may name no adapters."""
    benchmarks: Mapping[tuple[str, bool, Bucket], float] = field(default_factory=dict)
    """The release's benchmarks in seconds, by the engine's component, whether it is quantized, and its bucket."""
    step_times: dict[str | LoopKey, dict[tuple[int, bool], dict[int, float]]] = field(default_factory=dict)
    """By UNet or loop, and by variant and whether it is paired: batch entries times pixels of a call -> measured
    seconds."""
    same_code: list[dict[LoopKey, Loop]] = field(default_factory=list)
    """Loops of other weights. Their calls take as long as the calls of `loops`."""
    ranks: Ranks = ALONE
    """The ranks that divide the batches of the loops."""
    lead: "Callable[[Callable[[], Loop], LoopKey], Loop] | None" = None
    """Makes a loop that the other ranks follow, with the given function. None: no other rank follows this process."""
    text_stream: SideStream = field(init=False)
    first_text_stream: SideStream = field(init=False)
    encode_stream: SideStream = field(init=False)
    decode_stream: SideStream = field(init=False)
    """CUDA streams of text encoding (the first text encoder has its own), and of encoding and decoding images. An
    engine must always run on the same stream."""

    latents_normalization: tuple[torch.Tensor, torch.Tensor] | None = field(init=False)
    """Mean and deviation of the VAE's latents, each float32 [1, channels, 1, 1] on the device."""

    def __post_init__(self) -> None:
        self.text_stream, self.first_text_stream = SideStream(self.device), SideStream(self.device)
        self.encode_stream, self.decode_stream = SideStream(self.device), SideStream(self.device)
        self._use_settings()

    def _use_settings(self) -> None:
        mean, deviation = self.settings.latents_mean, self.settings.latents_std
        self.latents_normalization = None
        if mean is not None and deviation is not None:
            on_device = [torch.tensor(values, device=self.device)[:, None, None] for values in (mean, deviation)]
            self.latents_normalization = on_device[0][None], on_device[1][None]

    def in_fp16(self) -> "LoadedModel":
        """Return the same model with its UNets and its VAE decoder in fp16, in all steps, on this rank only.

        It has no adapters, and shares everything else.
        """
        return self.sharing(
            engines=self.engines | self.fp16_engines,
            fp16_engines={},
            fp16_steps=Fp16Steps(),
            quantized=frozenset(),
            adapters=None,
        )

    def sharing(self, **changes: Any) -> "LoadedModel":
        """Return a model of the same engines, with separate loops, on this rank only. `changes`: other fields."""
        other = copy.copy(self)  # without `__post_init__`: streams that are made and dropped would come round again
        for name, value in {"loops": {}, "ranks": ALONE, "lead": None, **changes}.items():
            setattr(other, name, value)
        other._use_settings()
        return other

    def run_on(self, other: "LoadedModel") -> None:
        """Use the engines, loops and streams of another model from now on. Their weights are this model's."""
        self.engines, self.fp16_engines = other.engines, other.fp16_engines
        self.loops, self.step_times = other.loops, other.step_times
        self.text_stream, self.first_text_stream = other.text_stream, other.first_text_stream
        self.encode_stream, self.decode_stream = other.encode_stream, other.decode_stream

    def queued_work(self) -> Callable[[], None]:
        """Return a function that waits for the work that this model's streams and the current one have so far."""
        streams = (self.text_stream, self.first_text_stream, self.encode_stream, self.decode_stream)
        waits = [stream.record(()).wait for stream in streams]
        if self.device.type == "cuda":
            waits.append(torch.cuda.current_stream(self.device).record_event().synchronize)

        def wait() -> None:
            for one in waits:
                one()

        return wait

    @property
    def active_adapters(self) -> AdapterSet | None:
        """The adapters that are merged into the weights. None: a merge has failed, so no image may use them."""
        return () if self.adapters is None else self.adapters.active

    def use_adapters(self, adapters: AdapterSet) -> None:
        """Merge adapters that are on the device into the weights, in place of the active ones.

        No image may be between its first stage and the end of its last loop: all of it needs the same weights.
        """
        if adapters == self.active_adapters:
            return
        assert self.adapters is not None
        with self._between_texts():
            self.adapters.merge(adapters)

    def use_embeddings(self, tokenizers: Mapping[str, ClipTokenizer], write: Callable[[], None]) -> None:
        """Read prompts with these tokenizers from now on, after `write` has written the rows of their embeddings."""
        with self._between_texts():
            write()
        self.tokenizers.update(tokenizers)  # in place: a model that shares the engines shares them

    @contextmanager
    def _between_texts(self) -> Iterator[None]:
        """Order work on the current stream after earlier texts are encoded, and before later ones are."""
        text_streams = (self.text_stream, self.first_text_stream)
        for stream in text_streams:
            stream.finish_before_current()
        try:
            yield
        finally:
            for stream in text_streams:
                stream.start_after_current()

    def loop(self, unet: str, height: int, width: int) -> Loop:
        """Return the loop of a UNet at a size in pixels. It is made at first use, with its buffers and graphs."""
        key = (unet, height, width)
        for _ in self.prepare_loop(key):
            pass
        return self.loops[key]

    def prepare_loop(self, key: LoopKey) -> Iterator[None]:
        """Make a loop unless it exists. Yields after each of its graphs, if no other rank follows this process."""
        if key in self.loops:
            return
        if self.lead is None:
            loop = yield from make_loop_in_parts(self, *key)
        else:
            loop = self.lead(partial(make_loop, self, *key), key)
        unet, height, width = key
        measured = self.step_times.get(key, self.step_times.get(unet, {}))
        known = scaled(measured, loop.costs.options, height * width)
        loop.costs.replace(known or self._benchmarks_of(key))
        self.loops[key] = loop

    def _benchmarks_of(self, key: LoopKey) -> dict[Option, float]:
        """Return the seconds of the calls of a loop whose engines the release has benchmarks of."""
        engines = self.denoiser(*key).options(*key[1:])
        keys = {
            option: (one.component, not option.exact, one.bucket)
            for option, one in engines.items()
            if one.bucket.batch.min == one.bucket.batch.max
        }
        return {option: self.benchmarks[one] for option, one in keys.items() if one in self.benchmarks}

    def has_extra_channels(self, unet: str) -> bool:
        """True if a UNet takes more channels than latents have: it was trained for inpainting."""
        return self.engines[unet].signature.extra_channels > 0

    @property
    def max_text_chunks(self) -> int:
        """The most chunks of a prompt that all UNets and ControlNets read."""
        tokens = int(self.engines[self.family.base.text].signature.inputs[0].shape[1])
        return min(text_chunks(engines.signature, tokens) for engines in self.engines.values())

    def set_step_times(self, key: LoopKey, times: Mapping[Option, float], for_all_sizes: bool) -> None:
        """Replace the costs of a loop by measured seconds. for_all_sizes: and the costs of all loops of its UNet."""
        unet, height, width = key
        points: dict[tuple[int, bool], dict[int, float]] = {}
        for option, seconds in times.items():
            points.setdefault((option.variant, option.paired), {})[option.batch * height * width] = seconds
        self.step_times[unet if for_all_sizes else key] = points
        for other, loop in chain(*(loops.items() for loops in (self.loops, *self.same_code))):
            if other == key or (for_all_sizes and other[0] == unet):
                loop.costs.replace(scaled(points, loop.costs.options, other[1] * other[2]))

    def denoiser(self, unet: str, height: int, width: int) -> Denoiser:
        """Return what runs in each step of a UNet at a size in pixels. Raises EngineError if nothing does."""
        exact = self.fp16_engines if self.fp16_steps.exist else {}
        engines = StepEngines(self.engines, exact, self.quantized | self.fp16_engines.keys())
        return find_denoiser(engines, unet, height, width, self.ranks, self.components)

    @property
    def controlnets(self) -> tuple[str, ...]:
        """The names of the release's ControlNets."""
        return controlnets_of(self.engines)


def make_loop(model: LoadedModel, unet: str, height: int, width: int, use_graphs: bool = True) -> Loop:
    """Make a loop for a UNet at a size in pixels: with CUDA graphs if its engines are static, otherwise op by op."""
    return run_to_end(make_loop_in_parts(model, unet, height, width, use_graphs))


def make_loop_in_parts(
    model: LoadedModel, unet: str, height: int, width: int, use_graphs: bool = True
) -> Generator[None, None, Loop]:
    """Make a loop as `make_loop` does. Yields after each graph, and returns the loop."""
    denoiser = model.denoiser(unet, height, width)
    if use_graphs and model.device.type == "cuda" and denoiser.plain.engines.is_static(height, width):
        loop = GraphLoop(denoiser, height, width, model.device)
        yield from loop.capture()
        return loop
    return EagerLoop(denoiser, height, width)


def run_to_end(work: Generator[None, None, Result]) -> Result:
    """Run all parts of some work, and return its result."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: Result = end.value
        return result
