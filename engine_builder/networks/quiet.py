"""Silence diffusers and transformers: a command shows its own progress, and errors state what they would log."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the libraries' progress bars, remarks and warnings, also of deprecated calls within them."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    logs = (of_diffusers, of_transformers)
    before = [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in logs]
    for log in logs:
        log.set_verbosity(log.CRITICAL)
        log.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for log, (verbosity, shows_progress) in zip(logs, before, strict=True):
            log.set_verbosity(verbosity)
            if shows_progress:
                log.enable_progress_bar()
