"""Signatures, and the check of tensors against them: it returns the sizes, or names the wrong input."""

import pytest
import torch

from model.engines import shapes
from model.engines.shapes import bind_shapes
from model.engines.signatures import (
    TextEncoderWidths,
    UnetWidths,
    VaeWidths,
    pooled_text_signature,
    unet_signature,
    unet_text_signature,
    unet_time_signature,
)
from model.errors import EngineError

TEXT_WIDTHS = TextEncoderWidths(tokens=77, width=12, pooled_width=13)
WIDTHS = UnetWidths(
    VaeWidths(latent_channels=4, scale=8), tokens=77, pooled_width=13, context_width=20, time_ids=6,
    time_embeds_width=30, keys_values_width=40,
)  # fmt: skip
UNET = unet_signature(WIDTHS, "float16")


def unet_inputs(batch: int = 2, height: int = 64, width: int = 96) -> dict[str, torch.Tensor]:
    return {
        "sample": torch.zeros(batch, 4, height // 8, width // 8, dtype=torch.float16),
        "time_embeds": torch.zeros(batch, 30, dtype=torch.float16),
        "keys_values": torch.zeros(batch, 77, 40, dtype=torch.float16),
    }


def test_returns_the_batch_and_the_size_in_pixels() -> None:
    assert bind_shapes(UNET, unet_inputs(3, 64, 96), "unet") == {"rows": 3, "height": 64, "width": 96}
    assert bind_shapes(UNET, dict(reversed(unet_inputs().items())), "unet")["rows"] == 2, "in any order"
    ids = torch.zeros(5, 77, dtype=torch.int64)
    assert bind_shapes(pooled_text_signature(TEXT_WIDTHS, "float32"), {"input_ids": ids}, "t") == {"rows": 5}


def test_sizes_of_a_shape() -> None:
    assert shapes.shape_at(("rows", 4, "height/8", "width"), {"rows": 2, "height": 64, "width": 96}) == (2, 4, 8, 96)


def test_outputs_of_one_network_are_inputs_of_the_next() -> None:
    [context] = unet_text_signature(WIDTHS, "float16").inputs
    assert context.shape == ("rows", 77, 20)
    unet_inputs_by_name = {tensor.name: tensor for tensor in UNET.inputs}
    for signature in (unet_text_signature(WIDTHS, "float16"), unet_time_signature(WIDTHS, "float16")):
        [output] = signature.outputs
        assert unet_inputs_by_name[output.name] == output
    pooled = pooled_text_signature(TEXT_WIDTHS, "float16").outputs[1]
    assert pooled.shape in [tensor.shape for tensor in unet_time_signature(WIDTHS, "float16").inputs]


@pytest.mark.parametrize("name", list(unet_inputs()))
def test_names_the_input_that_does_not_fit(name: str) -> None:
    good = unet_inputs()
    tensor = good[name]
    wrong = {
        "dtype": tensor.to(torch.float32),
        "a larger batch than the others": torch.cat([tensor, tensor[:1]]),
        "a dimension more": tensor[..., None],
        "a dimension less": tensor[0],
        "no dimension": tensor.flatten()[0],
    }
    if tensor.ndim > 1:
        wrong["another width"] = torch.cat([tensor, tensor], 1)
    for difference, tensor in wrong.items():
        with pytest.raises(EngineError, match=r"unet: input \w+ is .* expected"):
            bind_shapes(UNET, good | {name: tensor}, "unet")
        # The first input, `sample`, sets the sizes. Where it is wrong, the next one contradicts them.
        if name != "sample" or difference in ("dtype", "a dimension more", "another width"):
            with pytest.raises(EngineError, match=f"input {name} is"):
                bind_shapes(UNET, good | {name: tensor}, "unet")


def test_names_a_missing_or_unknown_input() -> None:
    good = unet_inputs()
    for name in good:
        with pytest.raises(EngineError, match="unet takes sample, time_embeds, .*; it received"):
            bind_shapes(UNET, {key: value for key, value in good.items() if key != name}, "unet")
    with pytest.raises(EngineError, match="controlnet"):
        bind_shapes(UNET, good | {"controlnet": torch.zeros(1)}, "unet")
    with pytest.raises(EngineError, match="received nothing"):
        bind_shapes(UNET, {}, "unet")
