"""Routing of HTTP requests by path, with authentication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

from dataplane.errors import DataPlaneError
from dataplane.protocol.http.auth import Guard
from dataplane.protocol.http.messages import HttpError, HttpRequest, Response, refusal

Handler = Callable[[HttpRequest], Response]


class Guarded:
    """Routes requests by their path. Paths in `open` are public; all others require authentication by `guard`."""

    def __init__(self, guard: Guard, handlers: Mapping[str, Handler], open: Mapping[str, Handler]) -> None:
        self._guard = guard
        self._handlers = handlers
        self._open = open

    def __call__(self, request: HttpRequest) -> Response:
        """Return the response of the path's handler. Errors of the data plane become responses; raises `HttpError`."""
        if request.path == "/login" and request.method == "POST":
            return self._guard.login(request)
        if request.method != "GET":
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method[:20]} not allowed; use GET", Allow="GET")
        handler = self._open.get(request.path)
        if handler is None:
            try:
                self._guard.check(request)
            except HttpError as error:
                if error.status is HTTPStatus.UNAUTHORIZED and request.path in ("/", "/login"):  # opened by a person
                    return self._guard.form()
                raise
            handler = self._handlers.get(request.path)
        if handler is None:
            raise HttpError(HTTPStatus.NOT_FOUND, f"path {request.path[:80]!r} does not exist")
        try:
            return handler(request)
        except DataPlaneError as error:
            return refusal(error)
