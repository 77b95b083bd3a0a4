"""The id of a request, which the log and the answer name."""

import re
import uuid
from collections.abc import Mapping

_SAFE = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def request_id(headers: Mapping[str, str]) -> str:
    """Return the caller's X-Request-Id if it is safe to log, else the platform's, else a new one."""
    for name in ("X-Request-Id", "X-Baseten-Request-Id"):
        if _SAFE.fullmatch(value := headers.get(name, "")):
            return value
    return uuid.uuid4().hex
