"""A reader that outlives its pins discards what it read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from dataplane import DataPlaneClient, Server, connect, serve
from dataplane.core import failpoints
from dataplane.errors import SessionExpiredError
from dataplane.ledger.commands import FenceSession

pytestmark = pytest.mark.integration

MIB = 1 << 20
ROWS = 8
FIRST, SECOND = torch.full((ROWS, MIB // 8), 1), torch.full((ROWS, MIB // 8), 2)
IDS = [f"s{i}" for i in range(ROWS)]
READS: dict[str, Callable[[DataPlaneClient], object]] = {
    "get_samples": lambda client: client.get_samples(IDS, "p", ["x"]),
    "views": lambda client: client.get_samples(IDS, "p", ["x"], copy=False),
}


@pytest.fixture
def server() -> Iterator[Server]:
    """So small that a second batch lies where the first did."""
    with serve({"capacity_bytes": 12 * MIB, "reserve_fraction": 0.0, "put_timeout_s": 60.0}) as running:
        yield running


@pytest.fixture
def other(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address, client_name="other") as client:
        client.register_partition("p", ["x"], None, ["task"])
        client.put_samples(IDS, "p", {"x": FIRST})
        yield client


@pytest.fixture(autouse=True)
def unarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def overwrite(other: DataPlaneClient) -> None:
    """Put another batch where the first one lay: it waits for that space until nobody may read there any more."""
    other.clear_samples(None, "p")
    other.register_partition("p", ["x"], None, ["task"])
    other.put_samples(IDS, "p", {"x": SECOND})


def lose_lock(client: DataPlaneClient) -> None:
    """What a library that closes all descriptors does."""
    lock = client._connections.get().session_state._lock
    assert lock is not None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, lock._fd)
    os.close(nothing)


@pytest.mark.parametrize("how", READS)
def test_without_its_lock_a_local_reader_returns_nothing_that_was_overwritten(server, other, how) -> None:
    with connect(server.address) as reader:
        READS[how](reader)

        def meanwhile() -> None:
            failpoints.disarm()
            lose_lock(reader)
            with connect(server.address) as another:
                another.get_samples(IDS, "p", ["x"])  # the unit looks who is gone when somebody attaches
            overwrite(other)

        failpoints.arm("get.mid_copy", meanwhile)
        with pytest.raises(SessionExpiredError):
            READS[how](reader)


def test_without_its_lock_a_reader_whose_session_lives_goes_on(server, other) -> None:
    with connect(server.address) as reader:
        path = reader._connections.get().session_state._lock.path
        failpoints.arm("get.mid_copy", lambda: (failpoints.disarm(), path.unlink()))
        assert torch.equal(reader.get_samples(IDS, "p", ["x"])["x"], FIRST)


def test_a_remote_reader_that_was_fenced_returns_nothing(server, other) -> None:
    with connect(server.address, force_remote=True, client_name="slow") as reader:
        READS["get_samples"](reader)
        session = reader._connections.get().session_state.session

        def meanwhile() -> None:
            failpoints.disarm()
            server._units[0]._execute_order(FenceSession(unit=1, session=session))
            overwrite(other)

        failpoints.arm("get.mid_copy", meanwhile)
        with pytest.raises(SessionExpiredError):
            READS["get_samples"](reader)
    assert torch.equal(other.get_samples(IDS, "p", ["x"])["x"], SECOND)
