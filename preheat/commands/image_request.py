"""The command `preheat request`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from preheat.console import notify
from preheat.image_texts.read import read_request


def request(
    file: Annotated[Path, typer.Argument(help="A PNG, JPEG or WebP file of A1111, ComfyUI or Preheat.")],
) -> None:
    """Print the request that makes an image like FILE, from the text in the file; notes go to standard error."""
    fields, notes = read_request(file)
    for note in notes:
        notify(note)
    print(json.dumps(fields, indent=2))
