"""Authentication of HTTP requests by the service's token, or by the cookie that the login form sets."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from dataplane.core.addresses import split_address
from dataplane.protocol.http.messages import HTML, HttpError, HttpRequest, Response

_FORM = Path(__file__).parent / "login.html"
_WHY = "<!-- why -->"


class Guard:
    """Authenticates requests. token: the service's token, or None; secure: the server uses TLS. `_cookie`: the value of
    the login cookie; "" without a token.

    Without a token the service is reachable only from this machine (`local`), protected by certificates, or open to its
    network. In the first and the last case, requests for a foreign host name are rejected, which prevents DNS rebinding
    by a web page.
    """

    def __init__(self, token: str | None, *, secure: bool, local: bool) -> None:
        self._token = None if token is None else token.encode()
        self._secure = secure
        self._local = local
        self._form = _FORM.read_text(encoding="utf-8")
        # The cookie proves the token without containing it, and is valid for this start of the server only.
        key = secrets.token_bytes(32)
        self._cookie = "" if self._token is None else hmac.digest(key, self._token, "sha256").hex()

    def check(self, request: HttpRequest) -> None:
        """Raise `HttpError` unless the request is authorized: by the token or the cookie, without a token by its host
        name (see the class)."""
        if self._token is None:
            # Without a token, only the clients' certificates protect a service beyond this machine.
            guarded = self._secure and not self._local
            if not guarded and not _names_this_machine(request.headers.get("host", "")):
                raise HttpError(
                    HTTPStatus.MISDIRECTED_REQUEST,
                    "this service has no token, so the host of the URL must be localhost, this machine's own name or a "
                    "numeric address",
                )
            return
        if self._shows_token(request) or self._shows_cookie(request):
            return
        raise HttpError(
            HTTPStatus.UNAUTHORIZED,
            "this service requires its token: send the header 'Authorization: Bearer TOKEN', or log in at /",
            WWW_Authenticate="Bearer",
        )

    def _shows_token(self, request: HttpRequest) -> bool:
        """Whether the request has the token in its Authorization header."""
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(shown.strip())

    def _is_token(self, shown: str) -> bool:
        return self._token is not None and hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), self._token)

    def _shows_cookie(self, request: HttpRequest) -> bool:
        """Whether the request has the cookie that `login` sets."""
        try:
            shown = SimpleCookie(request.headers.get("cookie", "")).get(self._cookie_name(request))
        except CookieError:
            return False
        return shown is not None and hmac.compare_digest(shown.value.encode(), self._cookie.encode())

    def _cookie_name(self, request: HttpRequest) -> str:
        """Return the cookie's name. It includes the port, because the ports of a host share their cookies."""
        try:
            return f"tq-{split_address(request.headers.get('host', ''))[1]}"
        except ValueError:
            return "tq"

    def form(self, why: str = "") -> Response:
        """Return the login form. why: an error to show in it."""
        body = self._form.replace(_WHY, why).encode()
        return Response(body=body, content_type=HTML, status=HTTPStatus.UNAUTHORIZED)

    def login(self, request: HttpRequest) -> Response:
        """Handle a submitted login form: set the cookie and redirect to the page, or return the form with an error."""
        shown = parse_qs(request.body.decode("utf-8", "surrogateescape"), max_num_fields=4).get("token", [""])[0]
        if self._token is not None and not self._is_token(shown):
            return self.form("Wrong token.")
        headers = {"Location": "/"}
        if self._token is not None:  # otherwise no cookie is required
            secure = "; Secure" if self._secure else ""
            cookie = f"{self._cookie_name(request)}={self._cookie}; Path=/; HttpOnly; SameSite=Strict{secure}"
            headers["Set-Cookie"] = cookie
        return Response(body=b"", content_type=HTML, status=HTTPStatus.SEE_OTHER, headers=headers)


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is a numeric address, localhost or this machine's own name, none of which a foreign web
    server can use."""
    own = {"localhost", socket.gethostname().lower()}
    if host.lower().rpartition(":")[0] in own or host.lower() in own:  # with or without a port
        return True
    has_port = ":" in host and not host.endswith("]")  # "[::1]" is an IPv6 address without a port
    try:
        name = split_address(host)[0] if has_port else host.strip("[]")
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
