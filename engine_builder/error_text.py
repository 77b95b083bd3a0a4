"""Turn errors of libraries and the operating system into the end of a sentence."""

import re

_NOISE = re.compile(r"\[Errno -?\d+\]\s*|\s*\(_ssl\.c:\d+\)|\[SSL: \w+\]\s*")


def cause_of(error: BaseException) -> str:
    """Return why a call failed, in one line, without numbers of errors and without a full stop at its end.

    >>> cause_of(ConnectionRefusedError(111, "Connection refused"))
    'Connection refused'
    """
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(_NOISE.sub("", text).split()).rstrip(".") or type(error).__name__
