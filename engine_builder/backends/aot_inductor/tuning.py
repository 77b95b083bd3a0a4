"""Keep what the compiler measures of a target's kernels, so that the next build does not measure it again.

Inductor's cache folder has the milliseconds of every candidate for a matrix product or convolution (`cache/`). Their
keys are operation, shapes, strides and dtypes, so they serve any network. The folder also has the block sizes chosen
for each generated kernel (`*.best_config`, by source and torch version). Inductor reads both while
`autotune_local_cache` is on, its default. The folder also holds generated code, and may be deleted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@contextmanager
def use_tuning_cache(folder: Path) -> Iterator[Path]:
    """Set Inductor's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another. Yields the folder in use.

    Changes the environment, which Inductor's worker processes inherit. So only one thread at a time may call it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    previous = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
    chosen = previous[_INDUCTOR]
    if chosen and chosen != default_cache_dir():  # Inductor itself sets the variable to its default
        yield Path(chosen)
        return
    os.environ[_INDUCTOR] = str(folder.absolute())
    clear_caches()  # some caches hold the previous folder
    try:
        yield folder.absolute()
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        clear_caches()
