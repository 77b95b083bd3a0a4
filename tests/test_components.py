"""The check that holds callers to a component's signature: what fits is measured, what does not is named."""

import pytest
import torch

from model.engines import shapes
from model.engines.shapes import Widths, bind_shapes, text_signature, unet_signature, vae_decoder_signature
from model.errors import EngineError

WIDTHS = Widths(tokens=77, text_width=8, text_width_2=12, pooled_width=12, latent_channels=4, time_ids=6, vae_scale=8)
UNET = unet_signature(WIDTHS, 30, 20, "float16")


def unet_inputs(rows: int = 2, height: int = 64, width: int = 96) -> dict[str, torch.Tensor]:
    return {
        "sample": torch.zeros(rows, 4, height // 8, width // 8, dtype=torch.float16),
        "time_embeds": torch.zeros(rows, 30, dtype=torch.float16),
        "keys_values": torch.zeros(rows, 77, 20, dtype=torch.float16),
    }


def test_what_fits_is_measured_in_rows_and_pixels() -> None:
    assert bind_shapes(UNET, unet_inputs(3, 64, 96), "unet") == {"rows": 3, "height": 64, "width": 96}
    assert bind_shapes(
        text_signature(8, 77, "float32", 12), {"input_ids": torch.zeros(5, 77, dtype=torch.int64)}, "t"
    ) == {"rows": 5}
    latents = {"latents": torch.zeros(1, 4, 16, 8)}
    assert bind_shapes(vae_decoder_signature(4, 8, "float32"), latents, "vae") == {
        "rows": 1,
        "height": 128,
        "width": 64,
    }


def test_signatures_name_what_a_component_takes_and_gives() -> None:
    assert [spec.name for spec in UNET.inputs] == list(unet_inputs())
    assert UNET.outputs[0].shape == UNET.inputs[0].shape
    assert [spec.name for spec in text_signature(8, 77, "float32", None).outputs] == ["hidden_states"]
    assert vae_decoder_signature(4, 8, "float32").outputs[0].shape == ("rows", 3, "height", "width")


@pytest.mark.parametrize("name", list(unet_inputs()))
def test_each_input_that_does_not_fit_is_named(name: str) -> None:
    good = unet_inputs()
    tensor = good[name]
    other = torch.float32 if tensor.dtype == torch.float16 else torch.float16
    wrong = {
        "dtype": tensor.to(other),
        "one row more than the others": torch.cat([tensor, tensor[:1]]),
        "a dimension more": tensor[..., None],
        "a dimension less": tensor[0],
        "no dimension": tensor.flatten()[0],
    }
    if tensor.ndim > 1:
        wrong["another width"] = torch.cat([tensor, tensor], 1)
    for how, bad in wrong.items():
        with pytest.raises(EngineError, match=r"unet: input \w+ is .* expected"):
            bind_shapes(UNET, good | {name: bad}, "unet")
        if name != "sample" or how in ("dtype", "a dimension more", "another width"):
            with pytest.raises(EngineError, match=f"input {name} is"):
                bind_shapes(UNET, good | {name: bad}, "unet")


def test_inputs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        EngineError, match=r"time_embeds is float16 \[3, 30\], expected float16 \['rows', 30\] with {'rows': 2,"
    ):
        bind_shapes(UNET, unet_inputs() | {"time_embeds": torch.zeros(3, 30, dtype=torch.float16)}, "unet")


def test_a_missing_or_unknown_input_is_named() -> None:
    good = unet_inputs()
    for name in good:
        with pytest.raises(EngineError, match="unet takes sample, time_embeds, .*; it received"):
            bind_shapes(UNET, {key: value for key, value in good.items() if key != name}, "unet")
    with pytest.raises(EngineError, match="controlnet"):
        bind_shapes(UNET, good | {"controlnet": torch.zeros(1)}, "unet")
    with pytest.raises(EngineError, match="received nothing"):
        bind_shapes(UNET, {}, "unet")


def test_the_order_of_inputs_is_the_signatures_not_the_callers() -> None:
    assert bind_shapes(UNET, dict(reversed(unet_inputs().items())), "unet")["rows"] == 2


def test_dtypes_go_by_torchs_names() -> None:
    for name, dtype in shapes.DTYPES.items():
        assert shapes.dtype_name(dtype) == name
