"""Names of this host, and addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from dataplane.core import addresses as host_module
from dataplane.core.addresses import (
    boot_id,
    dial,
    dialed,
    join_address,
    reachable_host,
    require_guard_beyond_loopback,
    resolve_host,
    split_address,
)


def test_the_boot_id_stays() -> None:
    assert boot_id() == boot_id() != ""


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1:65535", "[::1]:80"])
def test_addresses_split_and_join(address: str) -> None:
    assert join_address(*split_address(address)) == address


def test_a_host_beyond_loopback_needs_a_guard_and_the_refusal_names_each() -> None:
    require_guard_beyond_loopback("127.0.0.1", guarded=False)
    require_guard_beyond_loopback("localhost", guarded=False)
    require_guard_beyond_loopback("0.0.0.0", guarded=True)
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ValueError, match=r"config\.token.*--token-file.*--tls-cert.*--insecure"):
            require_guard_beyond_loopback(host, guarded=False)


@pytest.mark.integration
def test_a_wildcard_is_told_as_an_address_that_others_can_use() -> None:
    assert reachable_host("127.0.0.1") == "127.0.0.1"
    assert reachable_host("localhost") == "localhost"
    assert not ipaddress.ip_address(reachable_host("0.0.0.0")).is_unspecified
    assert resolve_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(("wildcard", "loopback"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
@pytest.mark.parametrize(
    ("there", "told"), [([], None), (["10.1.2.3"], "10.1.2.3"), (["10.1.2.3", "10.9.9.9"], "10.1.2.3, 10.9.9.9; set")]
)
def test_a_wildcard_without_a_default_route(
    wildcard: str, loopback: str, there: list[str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "own_address", lambda towards: loopback)
    monkeypatch.setattr(host_module, "interface_addresses", lambda version: there)
    if len(there) > 1:
        with pytest.raises(ValueError, match=f"no default route.*{told}.*--host"):
            reachable_host(wildcard)
    else:
        assert reachable_host(wildcard) == (told or loopback)


@pytest.mark.integration
def test_addresses_of_interfaces_are_those_that_others_can_use() -> None:
    for version in (4, 6):
        for address in map(ipaddress.ip_address, host_module.interface_addresses(version)):
            assert address.version == version
            assert not address.is_loopback
            assert not address.is_link_local


# --- connecting


def named(*addresses: str) -> Callable[..., list[Any]]:
    """`socket.getaddrinfo` of a host with these addresses."""

    def found(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return found


@pytest.mark.integration
@pytest.mark.parametrize("dead", [["127.0.0.9"], ["127.0.0.9", "127.0.0.8"]])
def test_a_dead_address_of_a_host_is_passed_over(dead: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", named(*dead, "127.0.0.1"))
        with dial(f"two.test:{port}", 60.0) as peer:
            assert dialed(peer) == f"127.0.0.1:{port}"


@pytest.mark.integration
def test_a_silent_address_of_a_host_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose backlog is full says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as ends:
        port = server.getsockname()[1]
        silent = ends.enter_context(socket.create_server(("127.0.0.9", port), backlog=0))
        for _ in range(2):
            full = ends.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(silent.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", named("127.0.0.9", "127.0.0.1"))
        with dial(f"two.test:{port}", 1.0) as peer:
            assert dialed(peer) == f"127.0.0.1:{port}"


@pytest.mark.integration
def test_a_host_whose_addresses_are_all_dead_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named("127.0.0.9", "127.0.0.8"))
    with pytest.raises(ConnectionRefusedError):
        dial("two.test:1", 60.0)
