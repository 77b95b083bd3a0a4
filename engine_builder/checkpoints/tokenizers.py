"""A model folder's CLIP tokenizer -> the one file and four numbers that `model.pipeline.tokenizer` serves it from."""

from pathlib import Path

from model.errors import MissingComponent
from model.pipeline.tokenizer import TokenizerSettings

# Transformers stands a number like 1e30 where a tokenizer's configuration gives no length.
_LONGEST = 4096


def export_tokenizer(folder: Path) -> tuple[bytes, TokenizerSettings]:
    """The bytes of tokenizer.json and the settings that go with it, from a diffusers `tokenizer` folder.

    Read through `transformers.CLIPTokenizer`, the class diffusers' SDXL pipelines load, so that what its
    configuration adds (SDXL's second tokenizer makes `!` a special token to pad with) is in the file too.

    Raises MissingComponent if the folder holds no CLIP tokenizer or does not say how long a prompt may be.
    """
    from transformers import CLIPTokenizer  # seconds of import, wanted by this function alone

    # Transformers makes up a tokenizer that knows nothing where these are missing, and says not a word.
    if not (folder / "tokenizer.json").is_file():
        if absent := [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]:
            raise MissingComponent(
                f"no CLIP tokenizer can be read from {folder}: it has no {' and no '.join(absent)}; "
                "download the model again, with its tokenizer folders"
            )
    try:
        # Local only: a path with a typing error must not turn into a download of that name.
        tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser raises, down to plain Exception
        raise MissingComponent(f"no CLIP tokenizer can be read from {folder}: {error}") from error
    if tokenizer.model_max_length > _LONGEST:
        raise MissingComponent(
            f"{folder} does not say how many tokens a prompt may have; "
            'set "model_max_length" (77 for CLIP) in its tokenizer_config.json'
        )
    settings = TokenizerSettings(
        max_length=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.backend_tokenizer.to_str().encode(), settings
