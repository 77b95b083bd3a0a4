"""Check that the text encoders' tables of tokens have a row for each id of the tokenizers.

Compiled code does not report an id without a row: on a CPU it ends the process, on a GPU it may read other memory.
"""

from collections.abc import Iterator, Mapping

from model.errors import MissingComponent
from model.loading.select import Selection
from model.pipeline.components import FAMILIES
from model.prompts.tokenizer import ClipTokenizer
from model.store.manifest import Blob
from model.store.manifest_json import parse_constants

TOKEN_TABLE = "embeddings.token_embedding.weight"  # the end of its name, in every text encoder


def check_token_ids(
    selection: Selection, tokenizers: Mapping[str, ClipTokenizer], contents: Mapping[str, bytes]
) -> None:
    """Raise MissingComponent if a tokenizer has an id without a row in the table of a selected text encoder.

    `contents`: the verified maps of constants, by digest. Opening an engine compares its map with the weights. Raises
    ManifestError for a damaged map.
    """
    for component, tokenizer in text_encoders(selection):
        for engine in selection.engines.get(component, ()):
            for constant in parse_constants(contents[engine.constants.sha256]).values():
                largest, rows = tokenizers[tokenizer].largest_id, next(iter(constant.shape), 0)
                if constant.tensor.endswith(TOKEN_TABLE) and largest >= rows:
                    raise MissingComponent(
                        f"The {tokenizer} of release {selection.manifest.name} has the id {largest}, in its vocabulary "
                        f"or its embeddings, but the table of tokens of {component} has {rows} rows."
                    )


def token_tables(selection: Selection) -> list[Blob]:
    """Return the maps of constants that `check_token_ids` reads."""
    engines = [engine for name, _ in text_encoders(selection) for engine in selection.engines.get(name, ())]
    return list({engine.constants.sha256: engine.constants for engine in engines}.values())


def text_encoders(selection: Selection) -> Iterator[tuple[str, str]]:
    """Yield the text encoders with engines, and their tokenizers."""
    for denoiser in FAMILIES[selection.manifest.family].denoisers:
        for component, tokenizer in denoiser.text_encoders:
            yield selection.shared.get(component, component), tokenizer
