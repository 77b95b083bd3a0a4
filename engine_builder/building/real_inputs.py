"""What each network is given while a short picture is drawn: real inputs, to hold engines against eager PyTorch on."""

from collections.abc import Collection

import torch

from engine_builder.building.eager_engine import EagerEngine
from engine_builder.networks.network import Network
from model.api.request import (
    GenerationRequest,
    ServedModel,
    SizeRange,
    read_defaults,
    resolve,
)
from model.denoising.noise_schedule import NoiseSchedule
from model.engines import components
from model.engines.engine import EngineSet
from model.pipeline.text_to_image import (
    LoadedModel,
    generate,
)
from model.pipeline.tokenizer import (
    ClipTokenizer,
    TokenizerSettings,
)
from model.store.manifest import Bucket, Settings, TokenizerRecord
from model.store.store import Store

_REAL_PROMPT = "a large red circle on a blue background"
_REAL_SIDE_LIMIT = 512  # pixels; real inputs of a CPU build are taken no larger, or a full SDXL would take an hour


def real_inputs(
    networks: dict[str, Network],
    settings: Settings,
    tokenizers: dict[str, TokenizerRecord],
    schedulers: dict[str, NoiseSchedule],
    store: Store,
    device: str,
    sizes: Collection[tuple[int, int]],
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """What each component is given while a short picture is drawn, refiner included, in eager PyTorch.

    `sizes`: heights and widths in pixels; none: the native one, or smaller. Raises BrokenImage where a picture is not
    all numbers.
    """
    eager = {
        name: EagerEngine(name, network.module, network.signature, recording=True) for name, network in networks.items()
    }
    model = LoadedModel(
        engines={name: EngineSet([engine]) for name, engine in eager.items()},
        tokenizers={name: _tokenizer(store, record) for name, record in tokenizers.items()},
        noise_schedules=schedulers,
        settings=settings,
        device=torch.device(device),
    )
    native = (min(settings.native_height, _REAL_SIDE_LIMIT), min(settings.native_width, _REAL_SIDE_LIMIT))
    for height, width in sorted(sizes or [native]):
        request = GenerationRequest(
            prompt=_REAL_PROMPT, negative_prompt="", width=width, height=height, num_inference_steps=4, seed=0,
            use_refiner=settings.refiner is not None, denoising_frac=0.5,
        )  # fmt: skip
        served = ServedModel(
            native_width=width,
            native_height=height,
            sizes=SizeRange(1, 2**16, 1),
            has_refiner=settings.refiner is not None,
            defaults=read_defaults({}),
        )
        generate(model, [resolve(request, served)])
    seen = {name: engine.seen for name, engine in eager.items()}
    for name in seen.keys() & set(components.GUIDED):  # the request's negative prompt was not none
        seen[name] = seen[components.UNET]
    return seen


def fit(real: list[dict[str, torch.Tensor]], network: Network, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
    """Real inputs of a bucket's size, at its rows: rows are repeated or dropped, which a row does not notice."""
    fitted = []
    for inputs in real:
        sizes = components.solve(network.signature, inputs, network.component)
        rows, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if bucket.holds(bucket.rows.min, height, width):
            wanted = min(max(rows, bucket.rows.min), bucket.rows.max)
            index = torch.arange(wanted) % rows
            fitted.append({name: tensor[index.to(tensor.device)] for name, tensor in inputs.items()})
    return fitted


def _tokenizer(store: Store, record: TokenizerRecord) -> ClipTokenizer:
    settings = TokenizerSettings(record.max_length, record.bos_token_id, record.eos_token_id, record.pad_token_id)
    return ClipTokenizer(store.get(record.blob.sha256, record.blob.bytes).read_bytes(), settings)
