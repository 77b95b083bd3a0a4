"""Where the compiler keeps what it measured of a target's kernels, so that the next build does not measure it again.

Inductor keeps, under its cache folder, the milliseconds of every candidate for a matrix product or convolution
(`cache/`, by operation, shapes, strides and dtypes, so for whatever network has it) and the block sizes it chose for
each kernel that it generates (`*.best_config`, by source and torch's version). Both are read again while
`autotune_local_cache` is on, which it is by default. The folder also holds generated code; it may be deleted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@contextmanager
def tuning_kept_in(folder: Path) -> Iterator[Path]:
    """Inductor's caches in `folder` for what is compiled meanwhile; where TORCHINDUCTOR_CACHE_DIR names another, there.

    Gives the folder that it is. For one thread: the environment is changed, which Inductor's own processes inherit.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    before = {name: os.environ.get(name) for name in (_FOLDER, _TRITON)}
    chosen = before[_FOLDER]
    if chosen and chosen != default_cache_dir():  # which Inductor writes there by itself
        yield Path(chosen)
        return
    os.environ[_FOLDER] = str(folder.absolute())
    clear_caches()  # some remember where they read
    try:
        yield folder.absolute()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        clear_caches()
