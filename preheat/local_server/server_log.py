"""The log of a local server, and the errors in it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

_TRACEBACK = "Traceback (most recent call last):\n"
_MODEL_ERROR = re.compile(r"model\.[\w.]+: ")


class ServerLog:
    """Reads the server's log while it is written: JSON records of its logger, and plain text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self._trace = ""
        self._error = ""
        self._failed_at: int | None = None  # number of messages up to the last exception, which is included
        self._offset = 0

    def new_messages(self) -> list[str]:
        """Return the messages of the complete lines written since the last call."""
        previous = len(self.messages)
        for line in self._new_lines():
            self._read(line)
        return self.messages[previous:]

    def until_failure(self) -> list[str]:
        """Return the messages up to the last logged exception. The later ones are about the shutdown."""
        return self.messages[: self._failed_at]

    def reason(self) -> str:
        """Return the message of the last exception logged or printed, else of the last logged error, else ""."""
        printed = "\n".join(self.messages)
        if self._trace or _TRACEBACK in printed:
            return exception_sentence(self._trace or printed)
        return self._error

    def refusal(self) -> str:
        """Return the message of the last logged exception if its class is one of model/, else ""."""
        return exception_sentence(self._trace) if _MODEL_ERROR.match(_last_exception(self._trace)) else ""

    def _new_lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                for line in log:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield line.decode(errors="replace").rstrip()
        except FileNotFoundError:
            return

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
            level, message = record["levelname"], record["message"]
        except (ValueError, KeyError, TypeError):
            if line:
                self.messages.append(line)
            return
        self.messages.append(message)
        if level in ("ERROR", "CRITICAL"):
            self._error = message
        if record.get("exc_info"):
            self._trace, self._failed_at = record["exc_info"], len(self.messages)


def exception_sentence(trace: str) -> str:
    """Return the exception's message at the end of a printed traceback.

    It begins with the exception's class, except for classes of model/. Their messages need no class.

    >>> exception_sentence('Traceback (most recent call last):\\n  File "x.py", line 1\\nKeyError: 3')
    'KeyError: 3'
    """
    return _MODEL_ERROR.sub("", _last_exception(trace), count=1)


def _last_exception(trace: str) -> str:
    """Return class and message of the exception at the end of a printed traceback."""
    lines = trace.rpartition(_TRACEBACK)[2].splitlines()
    while lines and lines[0].startswith(" "):
        lines.pop(0)
    return "\n".join(lines).strip()
