"""Ports that are held for workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from workers.placement import ports
from workers.placement.ports import PortKeeper

pytestmark = pytest.mark.integration


@pytest.fixture
def keeper() -> Iterator[PortKeeper]:
    made = PortKeeper()
    yield made
    made.release(list(made._held))


def bind(port: int, *options: int) -> None:
    with socket.socket() as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(("", port))
        sock.listen()


def test_no_two_are_the_same(keeper: PortKeeper) -> None:
    other = PortKeeper()
    found = [*keeper.hold(20), *other.hold(20), *keeper.hold(20)]
    other.release(found)
    assert len(set(found)) == 60


def test_a_held_port_is_for_its_worker_only(keeper: PortKeeper) -> None:
    (port,) = keeper.hold(1)
    with pytest.raises(OSError, match="in use"):
        bind(port)
    bind(port, socket.SO_REUSEADDR)
    bind(port, socket.SO_REUSEPORT)
    with socket.create_server(("", port)), pytest.raises(OSError, match="in use"):
        bind(port, socket.SO_REUSEADDR)


def test_a_released_port_is_anyones(keeper: PortKeeper) -> None:
    kept, released = keeper.hold(2)
    keeper.release([released, released])
    bind(released)
    with pytest.raises(OSError, match="in use"):
        bind(kept)


@pytest.mark.parametrize("dual", [True, False])
def test_hosts_with_and_without_ipv6(keeper: PortKeeper, monkeypatch: pytest.MonkeyPatch, dual: bool) -> None:
    if dual and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    (port,) = keeper.hold(1)
    with pytest.raises(OSError, match="in use"):
        bind(port)


def test_ports_that_run_out_are_an_error_that_holds_nothing(
    keeper: PortKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Third(socket.socket):
        def __init__(self, *family: int) -> None:
            super().__init__(*family)
            made.append(self)

        def bind(self, address: tuple[str, int]) -> None:
            if len(made) == 3:
                raise OSError("no port is free")
            super().bind(address)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    monkeypatch.setattr(socket, "socket", Third)
    with pytest.raises(OSError, match="no port is free"):
        keeper.hold(5)
    assert [sock.fileno() for sock in made] == [-1] * 3


def test_a_port_is_not_above_the_highest_that_is_asked_for(keeper: PortKeeper) -> None:
    low = keeper.hold(3, 20_000)
    assert all(1024 <= port <= 20_000 for port in low)
    assert len(set(low)) == 3
    with pytest.raises(OSError, match="in use"):
        bind(low[0])
    bind(low[0], socket.SO_REUSEADDR)
    with pytest.raises(ValueError, match="up to 80"):
        keeper.hold(1, 80)


def test_keepers_share_no_port_that_is_named(keeper: PortKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel's choice is too high, and one port only may be given out."""
    (port,) = keeper.hold(1)
    bound, other = ports._bind, PortKeeper()
    monkeypatch.setattr(ports, "LOWEST", port)
    monkeypatch.setattr(ports, "_bind", lambda named: bound(named) if named else _TooHigh())
    with pytest.raises(OSError, match=f"all ports from {port} to {port}"):
        other.hold(1, port)
    keeper.close()
    keeper.close()
    assert other.hold(1, port) == [port]
    other.close()


class _TooHigh(socket.socket):
    def getsockname(self) -> tuple[str, int]:
        return "", 65535
