"""Layouts of servers whose settings are not the fixture's."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from preheat.local_server.server import Layout, with_settings


def configured(layout: Layout, folder: Path, **settings: Any) -> Layout:
    """Return a copy of a layout in `folder`, whose config has these settings in place of its own."""
    root = Path(shutil.copytree(layout.root, folder / "root"))
    return with_settings(replace(layout, root=root, app=root / "app", packages=root / "packages"), **settings)
