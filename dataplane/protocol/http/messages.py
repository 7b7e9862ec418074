"""Requests and responses of the HTTP server, and the conversion of errors to responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import (
    AuthenticationError,
    BadRequestError,
    DataPlaneError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    WaitTimeoutError,
)

JSON = "application/json"
HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """An HTTP request. `path` excludes the query; `query` has each parameter once. `headers` by lower-case name."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Response:
    """The response to a request."""

    body: bytes
    content_type: str = JSON
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpError(Exception):
    """The request is rejected with `status`."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        """headers: additional headers of the response, with "_" for "-" in their names."""
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> Response:
        name = self.status.phrase.replace(" ", "")
        return Response(body=_error(name, str(self)), status=self.status, headers=self.headers)


def as_json(value: Any) -> Response:
    """Return values of the ledger as JSON. Arrays become lists; numbers that JSON cannot represent become null."""
    return Response(body=msgspec.json.encode(value, enc_hook=_plain))


def plain(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a plain-text response."""
    return Response(body=text.encode(), content_type=TEXT, status=status)


def refusal(error: DataPlaneError) -> Response:
    """Return the response for `error`, with its name and message."""
    return Response(body=_error(type(error).__name__, str(error)), status=_status(error))


def _status(error: DataPlaneError) -> HTTPStatus:
    """Return the HTTP status for the class of an error."""
    match error:
        case NotFoundError():
            return HTTPStatus.NOT_FOUND
        case AuthenticationError():
            return HTTPStatus.UNAUTHORIZED
        case BadRequestError():
            return HTTPStatus.BAD_REQUEST
        case ServiceError() | WaitTimeoutError():
            return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _error(name: str, message: str) -> bytes:
    return msgspec.json.encode({"error": name, "message": message})


def _plain(value: Any) -> Any:
    """Convert a numpy value, which the JSON encoder does not support, to Python's lists and numbers."""
    match value:
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded as JSON")


class Parameters:
    """The parameters of one request. Raises `InvalidRequestError` for missing, malformed or unknown parameters."""

    def __init__(self, request: HttpRequest, *known: str) -> None:
        unknown = sorted(set(request.query) - set(known))
        if unknown:
            raise InvalidRequestError(
                f"{request.path} has no parameter {unknown[0][:80]!r}; valid parameters: {', '.join(known) or 'none'}"
            )
        self._path = request.path
        self._query = request.query

    def text(self, name: str) -> str:
        """Return a required parameter."""
        if name not in self._query:
            raise InvalidRequestError(f"{self._path} requires the parameter {name!r}")
        return self._query[name]

    def number(self, name: str, default: int | None = None, *, most: float = math.inf) -> int:
        """Return a parameter as a whole number from 0 to `most`. It is required if `default` is None."""
        if default is not None and name not in self._query:
            return default
        text = self.text(name)
        # Fewer than 19 digits fit into 64 bits.
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= most):
            raise InvalidRequestError(f"{name}={text[:80]!r}: expected a whole number, at most {most:,}")
        return int(text)
