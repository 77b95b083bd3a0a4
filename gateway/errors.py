"""Errors of the gateway, and their form in OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from model.errors import PreheatError
from model.statuses import retry_after, status_of

# Fields of Preheat's requests -> parameters of OpenAI's API, where they differ.
_PARAMETERS = {"num_images": "n", "width": "size", "height": "size", "masks": "mask"}
# Parts of messages that name such fields.
_WORDS = {"`width`, `height` and `resize`": "`size` and `resize`", "`width` and `height` are": "`size` is"}


class GatewayConfigError(PreheatError):
    """The gateway cannot start: a backend's URL, the key file or the history file is unusable."""


class ApiError(PreheatError):
    """A request is not answered with images. `status`: the HTTP status; `param`: the parameter or field that caused it.

    `code`: a short name of the cause for programs. `retry_after`: seconds to wait before the next try, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the body of the answer."""
        param, message = self.param, str(self)
        if param is not None:
            param = _PARAMETERS.get(param.split(".")[0], param)
            if message.startswith(f"{self.param}: "):
                message = param + message.removeprefix(str(self.param))
        for native, own in _WORDS.items():
            message = message.replace(native, own)
        kind = "rate_limit_error" if self.status == 429 else "server_error" if self.status >= 500 else None
        return {
            "error": {
                "message": message,
                "type": kind or "invalid_request_error",
                "param": None if param is None else param.encode("ascii", "backslashreplace").decode(),
                "code": self.code,
            }
        }

    def response(self, body: Mapping[str, object]) -> JSONResponse:
        """Return the answer with this body."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(body, self.status, headers)


def api_error(error: PreheatError) -> ApiError:
    """Return the error of a request that the gateway itself does not pass on, with the status that a server has."""
    status, kind = status_of(error)
    return ApiError(status, str(error), None, kind, retry_after(error))


def refused(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that is refused because of a parameter."""
    return ApiError(400, message if param is None else f"{param}: {message}", param, code)


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON parser's pairs. Raises ApiError for a name that is given twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise refused(name[:64], "is given twice.")
        values[name] = value
    return values
