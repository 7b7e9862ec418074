"""Who may look: who shows the service's token, or the cookie that the login form gave for it."""

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
    """Lets requests through that may look. token: of the service, None: it has none; secure: it is reached by TLS.

    Without a token the service is this machine's alone (`local`), guarded by certificates, or open to its network. In
    the first and the last case a browser that a page of somebody else leads here by a name of its own is refused.
    """

    def __init__(self, token: str | None, *, secure: bool, local: bool) -> None:
        self._token = None if token is None else token.encode()
        self._secure = secure
        self._local = local
        self._form = _FORM.read_text(encoding="utf-8")
        key = secrets.token_bytes(32)
        self._cookie = "" if self._token is None else hmac.digest(key, self._token, "sha256").hex()

    def check(self, request: HttpRequest) -> None:
        """`HttpError` unless the request shows what it has to."""
        if self._token is None:
            guarded = self._secure and not self._local
            if not guarded and not _names_this_machine(request.headers.get("host", "")):
                raise HttpError(
                    HTTPStatus.MISDIRECTED_REQUEST,
                    "without a token this answers only to localhost, the name of this machine and addresses in numbers",
                )
            return
        if self._shows_token(request) or self._shows_cookie(request):
            return
        raise HttpError(
            HTTPStatus.UNAUTHORIZED,
            "this service wants its token: send the header 'Authorization: Bearer TOKEN', or log in at /",
            WWW_Authenticate="Bearer",
        )

    def _shows_token(self, request: HttpRequest) -> bool:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(shown.strip())

    def _is_token(self, shown: str) -> bool:
        return self._token is not None and hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), self._token)

    def _shows_cookie(self, request: HttpRequest) -> bool:
        try:
            shown = SimpleCookie(request.headers.get("cookie", "")).get(self._name(request))
        except CookieError:
            return False
        return shown is not None and hmac.compare_digest(shown.value.encode(), self._cookie.encode())

    def _name(self, request: HttpRequest) -> str:
        """Cookies are for all ports of a host, on each of which may be another service."""
        try:
            return f"tq-{split_address(request.headers.get('host', ''))[1]}"
        except ValueError:
            return "tq"

    def form(self, why: str = "") -> Response:
        """Where a person shows the token."""
        body = self._form.replace(_WHY, why).encode()
        return Response(body=body, content_type=HTML, status=HTTPStatus.UNAUTHORIZED)

    def login(self, request: HttpRequest) -> Response:
        """The form came back: the cookie, and on to the page."""
        shown = parse_qs(request.body.decode("utf-8", "surrogateescape"), max_num_fields=4).get("token", [""])[0]
        if self._token is not None and not self._is_token(shown):
            return self.form("That is not this service's token.")
        headers = {"Location": "/"}
        if self._token is not None:
            secure = "; Secure" if self._secure else ""
            cookie = f"{self._name(request)}={self._cookie}; Path=/; HttpOnly; SameSite=Strict{secure}"
            headers["Set-Cookie"] = cookie
        return Response(body=b"", content_type=HTML, status=HTTPStatus.SEE_OTHER, headers=headers)


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is an address, localhost or this machine's own name: not one that somebody else's server
    could have."""
    own = {"localhost", socket.gethostname().lower()}
    if host.lower().rpartition(":")[0] in own or host.lower() in own:
        return True
    try:
        name = split_address(host)[0] if not host.endswith("]") and ":" in host else host.strip("[]")
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
