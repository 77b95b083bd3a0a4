"""The model `generate_loop` as data: a whole request in one model, with in-flight batching by Preheat's scheduler."""

from engine_builder.triton_repository.config import ANY, Tensor, TritonModel

GENERATE_LOOP = "generate_loop"
REQUEST, FILE, EVENT = "request", "file", "event"
_WARMUP = b'{"prompt": "warm up", "num_inference_steps": 1, "use_refiner": false}'


def loop_model(requires_masks: bool = False) -> TritonModel:
    """Return `generate_loop`.

    requires_masks: true for a UNet that was trained for inpainting only. It refuses the request of Triton's warm-up,
    and `initialize` warms up in any case.

    request: the UTF-8 of the JSON of a request, as docs/requests.md describes it.
    file: the bytes of an image file, or of a preview's JPEG.
    event: the UTF-8 of a JSON object. See `engine_builder.triton_repository.serving.loop`.
    """
    return TritonModel(
        GENERATE_LOOP,
        inputs=(Tensor(REQUEST, "UINT8", (ANY,)),),
        outputs=(Tensor(FILE, "UINT8", (ANY,)), Tensor(EVENT, "UINT8", (ANY,))),
        serving="engine_builder.triton_repository.serving.loop.GenerateLoop",
        decoupled=True,
        warms_up=not requires_masks,
        warmup={} if requires_masks else {REQUEST: _WARMUP},
    )
