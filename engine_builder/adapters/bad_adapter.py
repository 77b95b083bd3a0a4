"""The error for a file that is not an adapter of the model, and the list of the key formats that are read."""

from model.errors import PreheatError

FORMATS = "kohya's scripts, diffusers, PEFT, OneTrainer, ComfyUI, LyCORIS and SimpleTuner"
"""The programs whose keys are read, see `engine_builder.adapters.names`."""


class BadAdapter(PreheatError):
    """A file is not an adapter that can be used with this model."""

    remedy = f"Give a LoRA, LoHa or LoKr in a safetensors file, made for this model, in the keys of {FORMATS}."
