"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it has started ends first, and its temporary files go.

A command sees one exception, wherever it is. A server that it runs gets SIGTERM and finishes its requests; see
`preheat.local_server.server.Server.stop`.
"""

import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_received = signal.SIGINT


class Terminated(KeyboardInterrupt):
    """The command was ended by a signal."""


def handle_signals() -> None:
    """Make the signals raise Terminated in the main thread, once. Signals that are ignored stay so, as with nohup."""
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)


def last_signal() -> signal.Signals:
    """Return the signal that ended the command: SIGINT unless another one was received."""
    return _received


def _terminate(number: int, _: FrameType | None) -> None:
    global _received
    _received = signal.Signals(number)
    for other in _SIGNALS:  # a repeated signal must not interrupt what ends now
        signal.signal(other, signal.SIG_IGN)
    raise Terminated
