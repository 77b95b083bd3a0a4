"""The routes of the playground page: the files of `page/`, which load nothing from another host."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

PAGE = Path(__file__).with_name("page")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_routes() -> Iterator[Route]:
    """Yield a route for each file of the page."""
    for path in sorted(PAGE.iterdir()):
        if path.suffix in _PAGE_TYPES:
            yield Route("/" if path.name == "index.html" else f"/{path.name}", _endpoint(path))


def _endpoint(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return FileResponse(path, media_type=_PAGE_TYPES[path.suffix], headers=_PAGE_HEADERS)

    return serve
