"""What is where: paths, and who may see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from dataplane.errors import DataPlaneError
from dataplane.web.auth import Guard
from dataplane.web.messages import HTML, HttpError, Request, Response, refusal

PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": HTML,
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".woff2": "font/woff2",
}

LOGIN_FILES = ("/base.css", "/icon.svg")
"""What the login form looks like: for everybody."""

Handler = Callable[[Request], Response]


class Guarded:
    """Answers requests by their path: `open` ones for everybody, others for whom `guard` lets through."""

    def __init__(self, guard: Guard, handlers: Mapping[str, Handler], open: Mapping[str, Handler]) -> None:
        self._guard = guard
        self._handlers = handlers
        self._open = open

    def __call__(self, request: Request) -> Response:
        if request.path == "/login" and request.method == "POST":
            return self._guard.login(request)
        if request.method != "GET":
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method[:20]}: this only answers GET", Allow="GET")
        handler = self._open.get(request.path)
        if handler is None:
            try:
                self._guard.check(request)
            except HttpError as error:
                if error.status is HTTPStatus.UNAUTHORIZED and request.path in ("/", "/login"):
                    return self._guard.form()
                raise
            handler = self._handlers.get(request.path)
        if handler is None:
            raise HttpError(HTTPStatus.NOT_FOUND, f"there is nothing at {request.path[:80]!r}")
        try:
            return handler(request)
        except DataPlaneError as error:
            return refusal(error)


def page(folder: Path = PAGE) -> dict[str, Handler]:
    """Handlers of the files in `folder`, which are read now; index.html is at /."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _TYPES]
    return {"/" if path.name == "index.html" else f"/{path.name}": _file(path) for path in files}


def _file(path: Path) -> Handler:
    response = Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})
    return lambda request: response
