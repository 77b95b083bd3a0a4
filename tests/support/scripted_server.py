"""An HTTP server whose responses a test scripts, for what is hard to get from a real one, such as half a response."""

import datetime
import ipaddress
import json
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.http_server import HttpServer, QuietHandler


@dataclass
class Answer:
    """A status, a body (whole, or in parts that are sent at once) and more headers. Then the connection is closed."""

    status: int
    body: bytes | Iterable[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


class ScriptedServer(HttpServer):
    """Answers each POST with `script(number, request)`: the number of earlier requests, and this one's JSON.

    `certificate` (see `write_certificate`) makes it an https server.
    """

    def __init__(self, script: Callable[[int, dict[str, Any]], Answer], certificate: Path | None = None) -> None:
        self.headers: list[dict[str, str]] = []
        """The headers of each request, in order. Their names are in lower case."""
        received = self.headers

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                number = len(received)
                received.append({name.lower(): value for name, value in self.headers.items()})
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = script(number, request)
                try:
                    self.send_response(answer.status)
                    for name, value in answer.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for part in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                        self.wfile.write(part)
                except ConnectionError:
                    pass  # the client has disconnected

        super().__init__(Handler)
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}/production/predict"


def write_certificate(path: Path) -> Path:
    """Write a self-signed certificate of 127.0.0.1 with its key. Returns `path`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
