"""Export a checkpoint's CLIP tokenizer as the one file and four numbers that `model.prompts.tokenizer` loads."""

from pathlib import Path

from engine_builder.checkpoints.folder import DOWNLOAD_AGAIN
from model.errors import MissingComponent
from model.prompts.tokenizer import TokenizerSettings

_MAX_TOKENS = 4096  # transformers returns a number like 1e30 if a tokenizer's configuration has no length
_FRAME_TOKENS = 2  # the begin and end tokens of a prompt


def export_tokenizer(folder: Path) -> tuple[bytes, TokenizerSettings]:
    """Return the bytes of tokenizer.json and the settings that complete it, from a diffusers `tokenizer` folder.

    The tokenizer is read through `transformers.CLIPTokenizer`, as diffusers' SDXL pipelines do. So the file includes
    what the configuration adds: SDXL's second tokenizer makes `!` a special token and pads with it.

    Raises MissingComponent if the folder has no CLIP tokenizer, or does not limit the length of a prompt.
    """
    from transformers import CLIPTokenizer  # here, because the import takes seconds

    # Without these files transformers silently returns a tokenizer with an empty vocabulary.
    if not (folder / "tokenizer.json").is_file():
        if missing := [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]:
            raise MissingComponent(f"{folder} has no CLIP tokenizer: it lacks {' and '.join(missing)}.", DOWNLOAD_AGAIN)
    try:
        # Local files only: otherwise a misspelled path is downloaded as a Hub id.
        tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the parser raises many types for a damaged file, also plain Exception
        reason = str(error).rstrip(".")
        raise MissingComponent(
            f"The CLIP tokenizer in {folder} cannot be read: {reason}.", "Use its files as they were published."
        ) from error
    length = tokenizer.model_max_length
    if type(length) is not int or not _FRAME_TOKENS < length <= _MAX_TOKENS:
        raise MissingComponent(
            f"{folder} does not limit the number of tokens of a prompt.",
            'Set "model_max_length" (77 for CLIP) in its tokenizer_config.json.',
        )
    for name in ("bos_token", "eos_token", "pad_token"):
        if getattr(tokenizer, f"{name}_id") is None:
            raise MissingComponent(
                f"The CLIP tokenizer in {folder} has no {name}.", "Use its files as they were published."
            )
    settings = TokenizerSettings(
        max_length=length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.backend_tokenizer.to_str().encode(), settings
