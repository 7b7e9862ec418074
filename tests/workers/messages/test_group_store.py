"""The store of process groups, the waits of their members for each other, and their file descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.alone import alone
from tests.restarts import wait_until
from tests.workers.messages.messengers import WAIT_S, Here, address, fails_at_both_ends
from tests.workers.messages.test_open_files import leave_free
from workers.errors import DeviceTransferError, OpenFilesError
from workers.messages import CollectiveGroupOptions, collectives, group_store
from workers.messages.collectives import CollectiveGroup, Membership
from workers.messages.group_store import StoreServer, files_for

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)


@pytest.fixture
def switched() -> Iterator[Here]:
    workers = Here(True, collectives="always")
    yield workers
    workers.close()


def _membership(store: StoreServer, *, name: str = "g", rank: int = 0, peers: frozenset[str] = frozenset()) -> Any:
    return Membership(
        name=name,
        store=store.address,
        rank=rank,
        size=2,
        device=torch.device("cpu"),
        options=CollectiveGroupOptions(),
        host="127.0.0.1",
        peers=peers,
        server=None if rank else store,
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("served", [True, False])
def test_a_group_that_waits_for_its_members_ends_once_it_is_closed(rank: int, served: bool) -> None:
    store = StoreServer("127.0.0.1", WAIT_S)
    if served:
        store.serve()
    group = CollectiveGroup(_membership(store, rank=rank), WAIT_S)
    outcomes: list[Any] = []
    group.submit(1, outcomes.append)
    group.close("a test")
    group.join(WAIT_S / 2)
    assert [type(each) for each in outcomes] == [ConnectionError]
    assert not any(thread.is_alive() for thread in group._threads)
    store.close()


def test_the_wait_for_members_has_an_end() -> None:
    store = StoreServer("127.0.0.1", WAIT_S)
    with pytest.raises(RuntimeError, match="1 of 2 members of process group g connected"):
        collectives.make_process_group(_membership(store), timedelta(seconds=0.1), threading.Event())
    store.close()


def test_the_thread_of_messages_does_not_wait_for_the_store(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it takes long here. Its timeout is that of the messenger."""
    asked, go_on, timeouts = threading.Event(), threading.Event(), []
    real = group_store.TCPStore

    def slow(*args: Any, **facts: Any) -> Any:
        timeouts.append(facts["timeout"])
        asked.set()
        assert go_on.wait(WAIT_S)
        return real(*args, **facts)

    monkeypatch.setattr(group_store, "TCPStore", slow)
    a, b, c = switched.worker(A, timeout_s=WAIT_S / 2), switched.worker(B), switched.worker(C)
    sent = a.send(torch.arange(3), B, async_op=True)
    received = b.recv(A, async_op=True)
    assert asked.wait(WAIT_S)
    a.send("meanwhile", C)
    assert c.recv(A) == "meanwhile"
    assert timeouts == [timedelta(seconds=WAIT_S / 2)]
    go_on.set()
    assert torch.equal(received.wait(), torch.arange(3))
    assert sent is not None
    sent.wait()


@pytest.mark.parametrize("part", ["create_server", "TCPStore"])
def test_a_store_that_cannot_be_made(switched: Here, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The next message has another store."""

    def fail(*args: Any, **facts: Any) -> Any:
        raise OSError(24, "Too many open files")

    a, b = switched.workers(2)
    with monkeypatch.context() as without:
        if part == "TCPStore":
            without.setattr(group_store, "TCPStore", fail)
        else:
            sockets = SimpleNamespace(create_server=fail, AF_INET=0)
            without.setattr(group_store, "socket", sockets)
        fails_at_both_ends(a, b, DeviceTransferError, "Too many open files|cannot open more files")
    a.send(torch.arange(5), B, async_op=True)
    assert torch.equal(b.recv(A), torch.arange(5))


def test_a_store_whose_start_failed_raises_the_same_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **facts: Any) -> Any:
        os.close(facts["master_listen_fd"])
        raise RuntimeError("no store")

    store = StoreServer("127.0.0.1", WAIT_S)
    monkeypatch.setattr(group_store, "TCPStore", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no store"):
            store.serve()
    store.close()


def test_a_group_with_a_peer_that_has_ended_is_forgotten(switched: Here) -> None:
    a, b = switched.workers(2)
    a.send(torch.arange(3), B)
    assert torch.equal(b.recv(A), torch.arange(3))
    b.close()
    wait_until(lambda: not a._io_thread._collectives._collectives, "the group has ended")


def test_each_group_in_the_making_needs_descriptors_of_its_own() -> None:
    alone(_make_two_at_a_time)


def _make_two_at_a_time() -> None:
    leave_free(30)
    with files_for("one", 20):
        with files_for("another", 10):
            pass
        with pytest.raises(OpenFilesError, match=r"another: this process .* \(ulimit -n"), files_for("another", 11):
            raise AssertionError("it has no descriptors")
    with files_for("another", 30):
        pass
