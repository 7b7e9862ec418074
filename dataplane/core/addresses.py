"""Names of this host, and addresses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataplane.core.backoff import pick

LOWEST_PORT = 15_000
"""Below are the ports that well-known servers like."""
_GET_FLAGS, _GET_ADDRESS, _UP = 0x8913, 0x8915, 1
"""Linux: SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP."""


def boot_id() -> str:
    """Names this boot of this machine's kernel: equal in two processes only if they run on one host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" in parts; IPv6 hosts in brackets, which are taken off. ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address {address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bracketed(host: str) -> str:
    """`host` as it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """ "host:port", an IPv6 host in brackets."""
    return f"{bracketed(host)}:{port}"


def dial(address: str, timeout_s: float) -> socket.socket:
    """A connection to "host:port": to the first address of the host that answers. Each gets its part of the time, so
    that a silent one leaves some for the next. OSError of the last one; a `TimeoutError` with its number where that was
    silent."""
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_s
    for place, (family, kind, protocol, _, where) in enumerate(found):
        try:
            return _dial_one(family, kind, protocol, where, (deadline - time.monotonic()) / (len(found) - place))
        except OSError:
            if place == len(found) - 1:
                raise
    raise OSError(f"{host} has no address")


def _dial_one(family: int, kind: int, protocol: int, where: Any, timeout_s: float) -> socket.socket:
    peer = socket.socket(family, kind, protocol)
    try:
        peer.settimeout(max(timeout_s, 0.001))
        peer.connect(where)
    except TimeoutError as error:
        peer.close()
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
    except BaseException:
        peer.close()
        raise
    return peer


def dialed(peer: socket.socket) -> str:
    """The "address:port" at the other end, in numbers."""
    host, port, *_ = peer.getpeername()
    return join_address(host, port)


def resolve_host(host: str) -> str:
    """The IP address to bind for `host`. OSError if it has none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def lasting_port() -> int:
    """A port, maybe in use, that the kernel gives to nobody by itself: while its server is down, no client's own end of
    a connection takes it (one that looks for the server on this host could even reach itself)."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    return pick(LOWEST_PORT, max(first - 1, LOWEST_PORT + 1000))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a service that listens on `host`."""
    return ipaddress.ip_address(resolve_host(host)).is_loopback


def require_guard_beyond_loopback(host: str, *, guarded: bool) -> None:
    """ValueError if others than this machine could reach `host` and nothing guards it."""
    if not guarded and not is_loopback(host):
        raise ValueError(
            f"host {host!r} is not loopback, others can reach it. Give the service a token (config.token, token_file, "
            "tq serve --token-file, TQ_TOKEN), or mutual TLS (tls_cert_file, tls_key_file, tls_ca_file; tq serve "
            "--tls-cert, --tls-key, --tls-ca), or say that anyone may use it (insecure=True, --insecure), or listen on "
            "127.0.0.1"
        )


def reachable_host(host: str) -> str:
    """What others should call a service that binds `host`: itself, or for a wildcard the address of this machine that
    its default route has; without one the only address beyond loopback that there is (loopback, if none is).
    ValueError where there are several."""
    address = ipaddress.ip_address(resolve_host(host))
    if not address.is_unspecified:
        return host
    found = own_address("192.0.2.1" if address.version == 4 else "2001:db8::1")
    if not ipaddress.ip_address(found).is_loopback:
        return found
    others = interface_addresses(address.version)
    if len(others) > 1:
        raise ValueError(
            f"host {host!r}: this machine has no default route, and the addresses {', '.join(others)}; name the one "
            "that others are to use (config.host, tq serve --host)"
        )
    return others[0] if others else found


def interface_addresses(version: int) -> list[str]:
    """This machine's IP addresses of that version on interfaces that are up, but for loopback and link-local ones: of
    IPv4 the first of each interface."""
    found = map(ipaddress.ip_address, _ipv4_addresses() if version == 4 else _ipv6_addresses())
    return sorted({str(each) for each in found if not (each.is_loopback or each.is_link_local)})


def _ipv4_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has none, or is gone
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _GET_FLAGS, asked), 16)[0]
                address = fcntl.ioctl(probe, _GET_ADDRESS, asked)[20:24]
                if flags & _UP:
                    yield socket.inet_ntoa(address)


def _ipv6_addresses() -> Iterator[str]:
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            yield str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))


def own_address(towards: str) -> str:
    """The address of this machine that packets to the IP address `towards` leave from; loopback where there is none."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only picks the address that packets would leave from.
            probe.connect((towards, 9))
        except OSError:
            return "127.0.0.1" if family == socket.AF_INET else "::1"
        return str(probe.getsockname()[0])
