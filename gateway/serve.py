"""Run the gateway's application with uvicorn."""

import resource
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from gateway.app import Gateway, refuse_body
from gateway.backend import parse_backend
from gateway.backends import Backends
from gateway.errors import GatewayConfigError
from gateway.history import History
from gateway.keys import Keys, read_keys
from gateway.listening import listen
from model.api.connections import BoundedConnection
from model.api.shutdown import GracefulShutdown
from model.errors import PreheatError
from model.settings import read_settings

_EXIT_SECONDS = 5  # after the grace period, for connections that are still open


@dataclass(frozen=True)
class Prepared:
    """A configured server, the socket that it listens on, and the servers behind it."""

    server: uvicorn.Server
    listener: socket.socket
    backends: Backends


def prepare(
    backends: list[str], key_file: Path | None, host: str, port: int, history_file: Path | None = None
) -> Prepared:
    """Check the settings and open the port. Raises GatewayConfigError."""
    parsed = [parse_backend(url) for url in backends]
    keys = Keys() if key_file is None else read_keys(key_file)
    if not keys.required and host != "127.0.0.1":
        raise GatewayConfigError(
            f"Without keys the gateway listens on 127.0.0.1 only, not on {host[:80]!r}.", "Give it keys: --key-file."
        )
    servers = Backends(parsed)
    listener = listen(host, port, GatewayConfigError)
    try:
        history = None if history_file is None else History(history_file)
    except PreheatError:
        listener.close()
        raise
    shutdown = GracefulShutdown(read_settings(variables=["grace_seconds"]).grace_seconds, refuse_body)
    application = Gateway(servers, keys, history, shutdown).build()
    config = uvicorn.Config(
        application,
        http=BoundedConnection,
        loop="asyncio",  # which accepts all waiting connections in each iteration; uvloop accepts one
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_EXIT_SECONDS,
        server_header=False,
    )
    return Prepared(uvicorn.Server(config), listener, servers)


def run(prepared: Prepared) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, and then until the requests in flight are answered.

    The process may open as many files as the system allows it.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    prepared.server.run(sockets=[prepared.listener])
