"""The greeting with which a ZMQ server begins a connection: shows what listens at an address, before a socket connects.

ZMQ itself does not tell a server that requires a token from one that does not, or from a program of another kind: it
reconnects until it succeeds. So a client exchanges greetings (ZMTP 3.1) on a connection of its own first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from dataplane.core.addresses import dial, dialed
from dataplane.errors import AuthenticationError, DataPlaneError, ServiceUnavailableError

SILENT = "check that its process is not stopped and its machine is not overloaded"
"""The remedy for a service that does not answer."""
UNREACHED = "check that its host is up and that no firewall blocks the port"
CLOSES = "it closes the connection at once: it may have reached its connection limit, or be another service"
NO_SERVICE = "the server at this address is not a data plane service; check host and port"
LOOK_S = 0.1
"""Interval of the calls of `check`."""
BUSY_S = 0.2
"""Delay before another attempt to reach a service that closes connections."""
KEPT_S = 0.4
"""A service that keeps a connection for so long has not closed it because of too many."""
_GREETING_BYTES = 64
_SIGNATURE = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
_VERSION = b"\x03\x01"
_MECHANISM_AT = len(_SIGNATURE) + len(_VERSION)
_MECHANISM_BYTES = 20
ENCRYPTED = b"CURVE"
OPEN = b"NULL"
"""The mechanisms of a service with and without a token."""


def greeting(mechanism: bytes) -> bytes:
    """Return the greeting of a client with this mechanism."""
    return (_SIGNATURE + _VERSION + mechanism.ljust(_MECHANISM_BYTES, b"\0")).ljust(_GREETING_BYTES, b"\0")


class Greeted(NamedTuple):
    """A ZMQ server. address: the numeric address at which it listens."""

    address: str
    mechanism: bytes


def reach(address: str, token: str | None, deadline: float, check: Callable[[], None]) -> str:
    """Return the numeric address of the service at `address`, one of those that its host name has. Blocks until
    `deadline` (of `time.monotonic`) at most. `check` is called often and may raise.

    Raises `ServiceUnavailableError` (at once if nothing listens, or something else does), `AuthenticationError` if only
    one of service and client has a token."""
    while True:
        try:
            greeted = _greet(address, deadline, ENCRYPTED if token else OPEN, check)
        except DataPlaneError:  # some are also an OSError
            raise
        except ConnectionRefusedError as error:
            why = f"cannot connect to it: {error.strerror or error}; start one with `tq serve` or dataplane.serve()"
            raise _unavailable(address, why) from error
        except TimeoutError as error:
            why = f"a server listens, but it does not answer in time; {SILENT}"
            if error.errno is not None:  # of the connection attempt
                why = f"cannot connect to it: {error.strerror}; {UNREACHED}"
            raise _unavailable(address, why) from error
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            if deadline - time.monotonic() <= BUSY_S:  # too short for another attempt
                raise _unavailable(address, CLOSES) from error
            time.sleep(BUSY_S)
        except OSError as error:
            raise _unavailable(address, f"cannot connect to it: {error.strerror or error}") from error
        else:
            _check_mechanism(greeted.mechanism, token, address)
            return greeted.address


def keeps_connections(address: str, check: Callable[[], None]) -> bool:
    """Whether the service with a token at `address` keeps a connection that says nothing after the greeting. One that
    has too many closes some at once. Blocks for about a second at most."""
    try:
        _greet(address, time.monotonic() + KEPT_S, ENCRYPTED, check, linger_s=KEPT_S)
    except (OSError, EOFError):
        return False
    return True


def _greet(
    address: str, deadline: float, mechanism: bytes, check: Callable[[], None], *, linger_s: float = 0.0
) -> Greeted:
    """Exchange greetings with the server at `address`, and keep the connection for `linger_s`. Raises OSError if it
    cannot be reached, TimeoutError without an errno if it is silent, EOFError if it closes the connection,
    `ServiceUnavailableError` if it is no ZMQ server."""
    own = greeting(mechanism)
    with dial(address, max(0.001, deadline - time.monotonic())) as peer:
        reached = dialed(peer)
        peer.settimeout(LOOK_S)
        peer.sendall(own[:_MECHANISM_AT])  # after the rest, a server with another mechanism closes the connection
        received = b""
        while len(received) < _GREETING_BYTES:
            check()
            if time.monotonic() >= deadline:
                raise TimeoutError
            try:
                data = peer.recv(_GREETING_BYTES - len(received))
            except TimeoutError:
                continue
            if not data:
                raise EOFError
            received += data
            if received[:1] != own[:1]:
                raise _unavailable(address, NO_SERVICE)
        peer.sendall(own[_MECHANISM_AT:])  # so that the server logs a client with another mechanism
        if linger_s:
            peer.settimeout(linger_s)
            with contextlib.suppress(TimeoutError):  # it is still open
                if not peer.recv(1):
                    raise EOFError
    return Greeted(reached, received[_MECHANISM_AT : _MECHANISM_AT + _MECHANISM_BYTES].rstrip(b"\0"))


def _check_mechanism(mechanism: bytes, token: str | None, address: str) -> None:
    """Raise the error if the server's mechanism does not fit this client."""
    peer = f"the controller at {address}"
    if mechanism == (ENCRYPTED if token else OPEN):
        return
    if mechanism == ENCRYPTED:
        raise AuthenticationError(peer=peer, why="no token was given")
    if mechanism == OPEN:
        why = "this client has a token, but the server there has none"
        hint = "Check the address, unset this client's token, or start the service with that token."
        raise AuthenticationError(peer=peer, why=why, hint=hint)
    raise _unavailable(address, NO_SERVICE)


def _unavailable(address: str, why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(address=address, why=why)
