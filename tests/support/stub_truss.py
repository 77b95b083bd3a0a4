"""Write a Truss with a model of a few lines, laid out as its image would be."""

import shutil
import textwrap
from pathlib import Path

from preheat.local_server.server import Layout, build_context, lay_out
from tests.support.repository import REPOSITORY


def write(folder: Path, model: str, config: str = "") -> Path:
    """Write a Truss with `model` as its model.py and Preheat's model/errors.py. Returns `folder`."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text("model_name: stub\npython_version: py311\n" + textwrap.dedent(config))
    (folder / "model" / "model.py").write_text(textwrap.dedent(model))
    for shared in ("__init__.py", "errors.py"):
        shutil.copy(REPOSITORY / "model" / shared, folder / "model")
    return folder


def make_layout(folder: Path, model: str, config: str = "") -> Layout:
    """Write a Truss and lay out its image in `folder`."""
    truss = write(folder / "truss", model, config)
    return lay_out(build_context(truss, truss / "config.yaml", folder / "build"), folder / "root")
