"""Opening the port of a server that runs on this machine."""

import errno
import socket

from model.errors import PreheatError

_BACKLOG = 2048  # connections; uvicorn's default


def listen(host: str, port: int, failure: type[PreheatError]) -> socket.socket:
    """Return a socket that listens on a port, for 0 on a free one. Raises `failure`, for example if it is taken."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family)
        try:
            # As uvicorn sets it: the port of an ended server can be used again at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        fact = (
            "is taken" if number == errno.EADDRINUSE else f"cannot be used: {getattr(error, 'strerror', None) or error}"
        )
        is_of_port = number in (errno.EADDRINUSE, errno.EACCES)
        fix = "Choose another one with --port." if is_of_port else "Name an address of this machine with --host."
        raise failure(f"Port {port} of {host[:80]} {fact}.", fix) from error
    return listener
