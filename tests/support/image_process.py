"""Run Python with the server image's files and packages, and without the repository's."""

import subprocess
import sys
import textwrap
from pathlib import Path

from model.store.store import Store
from preheat.local_server.server import Layout


def run_in_image(
    script: str, layout: Layout, store: Store, release: str, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `script` in the image's folder, with the image's environment and the release to serve."""
    environment: dict[str, str] = layout.config.get("environment_variables") or {}
    path = [str(layout.app), *(entry for entry in sys.path if not (Path(entry) / "engine_builder").is_dir())]
    return subprocess.run(
        [sys.executable, "-S", "-P", "-c", f"import sys; sys.path[:] = {path!r}\n" + textwrap.dedent(script)],
        cwd=layout.app,
        env={**environment, "PATH": "/usr/bin:/bin", "PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
