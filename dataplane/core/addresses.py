"""Host identity, and parsing, resolution and discovery of network addresses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dataplane.core.durations import pick

LOWEST_PORT = 15_000
"""Lower bound for chosen ports: ports below it are often used by well-known servers."""
_GET_FLAGS = 0x8913
_GET_ADDRESS = 0x8915
_UP = 1
"""Linux: SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP."""


def boot_id() -> str:
    """Return the id of this boot of the kernel. Two processes have the same id only if they run on one host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into host and port, and remove the brackets of an IPv6 host. Raises ValueError for any other
    format."""
    host, _, port = address.rpartition(":")  # without a colon, `host` is empty
    is_number = port.isascii() and port.isdigit()
    if not host or not is_number or not 0 < int(port) < 65536:
        raise ValueError(f"address {address!r} is not host:port with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bracketed(host: str) -> str:
    """Return `host` as written in an address: an IPv6 host in brackets."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 host in brackets."""
    return f"{bracketed(host)}:{port}"


def dial(address: str, timeout_s: float) -> socket.socket:
    """Connect to "host:port" and return the socket. Tries the addresses of the host in order and splits the remaining
    time evenly among them, so that an unresponsive address leaves time for the next. Raises OSError if the host has no
    address, else the error of the last one: `TimeoutError` with errno ETIMEDOUT if it did not respond."""
    host, port = split_address(address)
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_s
    for index, (family, kind, protocol, _, socket_address) in enumerate(infos):
        untried = len(infos) - index  # this address included
        try:
            return _connect(family, kind, protocol, socket_address, (deadline - time.monotonic()) / untried)
        except OSError:
            if untried == 1:
                raise
    raise OSError(f"host {host!r} has no IP address")


def _connect(family: int, kind: int, protocol: int, socket_address: Any, timeout_s: float) -> socket.socket:
    """Return a socket that is connected to this address. `TimeoutError` with errno ETIMEDOUT after `timeout_s`."""
    peer = socket.socket(family, kind, protocol)
    try:
        peer.settimeout(max(timeout_s, 0.001))  # 0 would make the socket non-blocking
        peer.connect(socket_address)
    except TimeoutError as error:  # of the socket module, which sets no errno
        peer.close()
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
    except BaseException:
        peer.close()
        raise
    return peer


def dialed(peer: socket.socket) -> str:
    """Return the numeric "address:port" of the peer."""
    host, port, *_ = peer.getpeername()
    return join_address(host, port)


def resolve_host(host: str) -> str:
    """Return the IP address to bind for `host`. Raises OSError if it has none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def lasting_port() -> int:
    """Return a random port below the kernel's ephemeral range; it may be in use. While the server of such a port is
    down, no outgoing connection is assigned the port. (With an ephemeral port, a client that reconnects to a server on
    this host could connect to itself.)"""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    # At least 1000 ports to pick from, even if the ephemeral range begins lower.
    return pick(LOWEST_PORT, max(first, LOWEST_PORT + 1000))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    return ipaddress.ip_address(resolve_host(host)).is_loopback


def require_guard_beyond_loopback(host: str, *, guarded: bool) -> None:
    """Raise ValueError if other machines can reach `host` and `guarded` is false."""
    if not guarded and not is_loopback(host):
        raise ValueError(
            f"host {host!r} is not loopback, so other machines can reach it. Set a token (config.token, token_file, tq "
            "serve --token-file, TQ_TOKEN), allow unauthenticated access (insecure=True, --insecure), or listen on "
            "127.0.0.1"
        )


def reachable_host(host: str) -> str:
    """Return the host name under which other machines reach a server that binds `host`: `host` itself, unless it is a
    wildcard. For a wildcard, return the source address of the default route, else the only non-loopback address of this
    machine, else loopback. Raises ValueError if several addresses are possible."""
    address = ipaddress.ip_address(resolve_host(host))
    if not address.is_unspecified:
        return host
    # These addresses are reserved for documentation, so only the default route leads to them.
    source = own_address("192.0.2.1" if address.version == 4 else "2001:db8::1")
    if not ipaddress.ip_address(source).is_loopback:
        return source
    candidates = interface_addresses(address.version)
    if len(candidates) > 1:
        raise ValueError(
            f"host {host!r}: this machine has no default route and several addresses: {', '.join(candidates)}; set the "
            "one that other machines should use (config.host, tq serve --host)"
        )
    return candidates[0] if candidates else source  # `source` is loopback


def interface_addresses(version: int) -> list[str]:
    """Return this machine's IP addresses of the given IP version, without loopback and link-local addresses. For IPv4,
    only the first address of each active interface is returned."""
    addresses = map(ipaddress.ip_address, _ipv4_addresses() if version == 4 else _ipv6_addresses())
    return sorted({str(address) for address in addresses if not (address.is_loopback or address.is_link_local)})


def _ipv4_addresses() -> Iterator[str]:
    """Yield the first IPv4 address of each active interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # A `struct ifreq`: 16 bytes of name, then the result: flags, or a sockaddr with the address at offset 4.
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # the interface has no address, or was removed
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _GET_FLAGS, request), 16)[0]
                address = fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24]
                if flags & _UP:
                    yield socket.inet_ntoa(address)


def _ipv6_addresses() -> Iterator[str]:
    """Yield the IPv6 addresses of all interfaces."""
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            yield str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))


def own_address(towards: str) -> str:
    """Return the source address of packets from this machine to the IP address `towards`; loopback without a route."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; the kernel only selects the source address.
            probe.connect((towards, 9))  # any port
        except OSError:
            return "127.0.0.1" if family == socket.AF_INET else "::1"
        return str(probe.getsockname()[0])


Resolver = Callable[[str], str]

_resolvers: dict[str, Resolver] = {}


def register_resolver(scheme: str, resolve: Resolver) -> None:
    """Resolve addresses "scheme:REST" to the "host:port" that `resolve(REST)` returns, at each connect."""
    _resolvers[scheme] = resolve


def resolve(address: str) -> str:
    """Return the "host:port" of an address. Raises ValueError if it has neither that form nor a registered scheme."""
    scheme, _, rest = address.partition(":")
    if scheme in _resolvers:
        return resolve(_resolvers[scheme](rest))
    if scheme == "actor":
        raise ValueError(f"address {address!r} names a Ray actor; run `import workers` first, which can resolve it")
    return join_address(*split_address(address))
