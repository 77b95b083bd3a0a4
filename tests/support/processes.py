"""The child processes of a process, by what they run."""

import psutil


def children_that_run(module: str, parent: int) -> list[psutil.Process]:
    """Return the running children of a process whose command lines contain `module`."""

    def runs_module(child: psutil.Process) -> bool:
        try:
            return module in " ".join(child.cmdline())
        except psutil.NoSuchProcess:  # it has ended, or is a zombie
            return False

    return [child for child in psutil.Process(parent).children() if runs_module(child)]
