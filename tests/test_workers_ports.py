"""Ports that are held for workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from workers.ports import PortKeeper

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
    ports = [*keeper.hold(20), *other.hold(20), *keeper.hold(20)]
    other.release(ports)
    assert len(set(ports)) == 60


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
