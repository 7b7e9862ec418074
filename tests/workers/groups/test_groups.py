"""Groups of workers without Ray."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from dataplane.core.addresses import split_address
from dataplane.protocol.fd_limits import OF_A_CONTEXT
from tests.alone import alone
from tests.children import Child
from tests.open_files import exhausted
from tests.restarts import Proxy, wait_until
from tests.workers.channels.channels import CAPACITY, broker, make
from tests.workers.messages.messengers import Here, address, one_connection
from workers.channels import Channel, ChannelBroker
from workers.directory import Directory, DirectoryClient, Kind, server
from workers.directory import client as client_module
from workers.errors import DeviceLockTimeoutError, OpenFilesError, WorkerCallError, WorkerExitError
from workers.groups import started_group
from workers.groups import virtual_cluster as module
from workers.groups.calls import GroupCall
from workers.groups.device_lock import DeviceLock
from workers.groups.remote_errors import portable
from workers.groups.started_group import Called, StartedGroup
from workers.groups.virtual_cluster import RayVirtualCluster, ResourcesNotReadyError
from workers.messages import Messenger
from workers.placement.ports import PortKeeper
from workers.transport import waiting

# --- Locks of accelerators, between workers of one node.


WAIT_S = 60.0
HOLD = """
import sys
from workers.groups.device_lock import DeviceLock
DeviceLock("w:9", ["0"], "job", sys.argv[1]).acquire()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """The folder of the files; none is left in it."""
    yield tmp_path
    assert not [path for folder in tmp_path.iterdir() for path in folder.iterdir()]


def lock(folder: Path, rank: int, *devices: str, job: str = "job") -> DeviceLock:
    return DeviceLock(f"w:{rank}", devices, job, folder)


def held(one: DeviceLock) -> bool:
    """Whether another worker holds it."""
    try:
        one.acquire(timeout_s=0.0)
    except DeviceLockTimeoutError:
        return True
    one.release()
    return False


@pytest.mark.integration
def test_one_worker_at_a_time_has_an_accelerator(files: Path) -> None:
    first, second = lock(files, 0, "0", "1"), lock(files, 1, "1", "2")
    with first:
        assert held(second)
        assert held(lock(files, 2, "0"))
        assert not held(lock(files, 2, "2"))
        assert not held(lock(files, 2))
        assert not held(lock(files, 2, "0", job="another"))
    assert not held(second)
    with second:
        assert held(first)


@pytest.mark.integration
def test_who_waits_has_it_once_it_is_released(files: Path) -> None:
    first, got = lock(files, 0, "0"), threading.Event()
    first.acquire()

    def wait(rank: int) -> None:
        with lock(files, rank, "0"):
            got.set()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    assert not got.is_set()
    first.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert got.is_set()


@pytest.mark.integration
def test_threads_of_a_worker_have_it_together(files: Path) -> None:
    mine, other = lock(files, 0, "0"), lock(files, 1, "0")
    with mine:
        thread = threading.Thread(target=mine.acquire)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert held(other)
    mine.release()
    assert not held(other)
    with pytest.raises(RuntimeError, match="worker w:0: the worker does not hold it"):
        mine.release()


@pytest.mark.integration
def test_a_wait_names_who_holds_it(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.01)
    first, second = lock(files, 0, "1"), lock(files, 1, "0", "1")
    with first:
        thread = threading.Thread(target=second.acquire)
        thread.start()
        wait_until(lambda: "w:1: accelerator 1, held by w:0: waiting for" in caplog.text, "the log names it")
    thread.join(WAIT_S)
    assert held(first)
    second.release()


@pytest.mark.integration
def test_a_wait_that_times_out_leaves_nothing(files: Path) -> None:
    first, second = lock(files, 0, "1"), lock(files, 1, "0", "1")
    with first:
        with pytest.raises(DeviceLockTimeoutError, match=r"w:1 waited .* accelerator 1, which w:0 holds"):
            second.acquire(timeout_s=0.2)
        assert not held(lock(files, 2, "0"))
    with second:
        assert held(first)


@pytest.mark.integration
def test_it_goes_with_its_process(files: Path) -> None:
    with Child([sys.executable, "-c", HOLD, str(files)]) as child:
        assert child.line() == "holds"
        mine = lock(files, 0, "0")
        assert held(mine)
        thread = threading.Thread(target=mine.acquire, args=(WAIT_S,))
        thread.start()
        os.kill(child.pid, signal.SIGKILL)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        mine.release()


@pytest.mark.integration
def test_a_forked_child_does_not_keep_it(files: Path) -> None:
    mine, other = lock(files, 0, "0"), lock(files, 1, "0")
    mine.acquire()
    ready, go_on = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_on)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    mine.release()
    try:
        assert not held(other)
    finally:
        os.close(go_on)
        os.waitpid(child, 0)


# --- Where a process may open no more files, what needs one says so, leaves none open, and works once
# there are some.


__all__ = ["broker", "make", "one_connection"]


def _refused(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], Any]) -> None:
    before = psutil.Process().num_fds()
    says = r"cannot open more files \(ulimit -n \d+\); raise the limit of open files"
    with exhausted(monkeypatch, owner, name), pytest.raises(OpenFilesError, match=says):
        work()
    # What was connected to closes its end once it notices.
    wait_until(lambda: psutil.Process().num_fds() <= before, "what was opened to be closed")


@pytest.mark.integration
def test_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    _refused(monkeypatch, os, "eventfd", Directory.serve)
    with Directory.serve() as served:
        _refused(monkeypatch, os, "eventfd", lambda: DirectoryClient(served.address))
        with DirectoryClient(served.address) as client:
            assert client.listing


@pytest.mark.integration
def test_messages(one_connection: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    client = one_connection.client()
    assert client.listing(Kind.WORKER) == [], "it is connected"
    monkeypatch.setattr(one_connection, "client", lambda: client)
    _refused(monkeypatch, os, "eventfd", lambda: one_connection.worker(address(0)))
    a = one_connection.worker(address(0))
    assert a.broadcast(1, [address(0)]) == 1


@pytest.mark.integration
def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = PortKeeper()
    _refused(monkeypatch, socket, "socket", lambda: keeper.hold(1))
    keeper.release(keeper.hold(1))


@pytest.mark.integration
def test_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    with exhausted(monkeypatch, os, "eventfd"), pytest.raises(OpenFilesError, match="a channel broker: "):
        ChannelBroker(capacity_bytes=CAPACITY)
    _refused(monkeypatch, socket, "socket", lambda: ChannelBroker(capacity_bytes=CAPACITY))


@pytest.mark.integration
def test_a_channel(make: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker is there all the time, and nothing is said of its end."""
    first = make()
    first.put(0)
    assert first.get() == 0, "it is connected"
    other = Channel(first._settings)
    _refused(monkeypatch, socket, "socket", lambda: other.put(1))
    _refused(monkeypatch, os, "eventfd", lambda: other.get(async_op=True))
    other.put(1)
    assert other.get(async_op=True).wait() == 1
    other.disconnect()


@pytest.mark.integration
def test_a_directory_and_its_client_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither opens a file where one of its clients, or it, has lost its connection."""
    monkeypatch.setattr(server, "GRACE_S", 600.0)
    monkeypatch.setattr(client_module, "AWAY_S", 600.0)
    with Directory.serve() as served:
        proxy = Proxy(split_address(served.address)[1])
        with DirectoryClient(f"127.0.0.1:{proxy.port}") as client:
            client.register_worker_group("g", {})
            client.register_channel("c", ("somewhere",), {})
            with exhausted(monkeypatch, Path, "read_text"):
                proxy.cut()
                proxy.heal()
                assert client.lookup_worker_group("g").live
                assert client.lookup_channel("c").live
        proxy.close()


# --- where ZMQ's threads would find none, and end the process -----------------------------------------------------


def _refuse_with(left: int) -> None:
    """Alone: the hard limit cannot be raised again."""
    client_says, messages_say = "a client of the job's directory", "messages of worker g:0"
    served = Directory.serve()
    client = DirectoryClient(served.address)
    assert client.listing(Kind.WORKER) == [], "it is connected"
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + left, first + left))
    for says, work in (
        ("serving a job's directory", Directory.serve),
        (client_says, lambda: DirectoryClient(served.address)),
        (messages_say, lambda: Messenger(address(0), client)),
    ):
        with pytest.raises(OpenFilesError, match=f"{says}.*cannot open more files"):
            work()
    client.close()
    served.close()


@pytest.mark.integration
@pytest.mark.parametrize("left", [0, 5, OF_A_CONTEXT - 1])
def test_too_few_for_a_context(left: int) -> None:
    alone(_refuse_with, left)


def _serve_with_the_least() -> None:
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with Directory.serve() as served, DirectoryClient(served.address) as client, Messenger(address(0), client) as a:
        assert a.broadcast(1, [address(0)]) == 1


@pytest.mark.integration
def test_a_directory_allows_itself_what_it_may_have_before_it_counts() -> None:
    alone(_serve_with_the_least)


# --- What is raised in a worker arrives as what it is, as far as it can be sent.


class OfTwoFacts(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"code {code}: {why}")
        self.code = code


class Prefixed(Exception):
    """Made again from its `args`, it would say it twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


class Locked(Exception):
    """Has what no process can send."""

    def __init__(self) -> None:
        super().__init__("locked", threading.Lock())
        self.lock = threading.Lock()


class Unsendable(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("never")

    def __str__(self) -> str:
        raise RuntimeError("never")


def sent(error: BaseException) -> Any:
    return pickle.loads(cloudpickle.dumps(portable(error)))


@pytest.mark.parametrize(
    "error", [KeyError("k"), FileNotFoundError(2, "No such file", "x"), OfTwoFacts(7, "late"), Prefixed("x")]
)
def test_type_and_message_are_kept(error: Exception) -> None:
    back = sent(error)
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_what_cannot_be_sent_of_it_arrives_as_text() -> None:
    back = sent(Locked())
    assert type(back) is Locked
    assert "unlocked" in back.args[1]
    assert "unlocked" in back.lock


def test_a_class_made_in_the_worker_arrives() -> None:
    class Local(ValueError):
        pass

    assert isinstance(sent(Local("here")), ValueError)


def test_one_that_cannot_be_sent_at_all_is_told() -> None:
    back = sent(Unsendable())
    assert isinstance(back, WorkerCallError)
    assert back.kind == "tests.workers.groups.test_groups.Unsendable"


def test_exits_are_told() -> None:
    back = sent(SystemExit(3))
    assert isinstance(back, WorkerExitError)
    assert (back.kind, back.message) == ("SystemExit", "3")


# --- What ends with the actors of a group, and in which order.


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has ended so far."""
    ended: list[str] = []

    def kill(actors: list[Any]) -> bool:
        ended.extend(actors)
        return "stuck" not in actors

    monkeypatch.setattr(started_group, "kill", kill)
    return ended


def group_of(ended: list[str], *actors: str) -> StartedGroup:
    group = StartedGroup()
    group.actors += cast(Any, actors)
    group.owners += cast(Any, ["initializer"])
    group.before.callback(ended.append, "name")
    group.before.callback(ended.append, "watch")
    group.after.callback(ended.append, "bundles")
    group.after.callback(ended.append, "ports")
    return group


def test_a_group_ends_once_and_says_whether_all_were_killed(ended: list[str]) -> None:
    group = group_of(ended, "first", "stuck")
    assert group.end() is False
    assert ended == ["watch", "name", "first", "stuck", "initializer", "ports", "bundles"]
    assert (group.actors, group.owners) == ([], [])
    assert group.end() is True
    assert len(ended) == 7


def test_a_start_that_fails_ends_what_was_started(ended: list[str]) -> None:
    group = group_of(ended, "first")
    with pytest.raises(KeyError, match="told to fail"), group.starting():
        raise KeyError("told to fail")
    assert ended == ["watch", "name", "first", "initializer", "ports", "bundles"]


def test_what_goes_wrong_at_the_end_keeps_nothing_alive(ended: list[str]) -> None:
    group = group_of(ended, "first")
    group.before.callback(lambda: pytest.fail("no answer"))
    with pytest.raises(pytest.fail.Exception, match="no answer"):
        group.end()
    assert ended == ["watch", "name", "first", "initializer", "ports", "bundles"]


# --- What a virtual cluster says of a node that does not hold ports. Without Ray.


@pytest.mark.parametrize(
    ("error", "why"),
    [(GetTimeoutError("Get timed out"), "no response within 7 s"), (RayError("the actor died"), "the actor died")],
)
def test_a_node_that_gives_no_ports_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: RayError, why: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module.ray, "get", fail)
    cluster = RayVirtualCluster([1])
    cluster.ready_timeout_s = 7.0
    keeper: Any = object()
    cluster._keepers["here"] = keeper
    ports: Any = object()
    with pytest.raises(ResourcesNotReadyError, match=f"^cannot hold ports on node here: {why}$"):
        cluster._held_ports(ports, "here")
    assert not cluster._keepers


# --- Results of a group's call, whichever worker ends first.


class Reference:
    """Stands for what Ray gives for a call."""

    def __init__(self) -> None:
        self.ended: Future[str] = Future()

    def future(self) -> Future[str]:
        return self.ended


def test_results_are_in_the_order_of_the_call_whichever_worker_ends_first() -> None:
    references = [Reference() for _ in range(3)]
    calls = [Called(f"talkers:{rank}", cast(Any, one)) for rank, one in enumerate(references)]
    following = GroupCall("Talker.rank", calls, None).then(list)
    for rank in (2, 0, 1):
        assert not following.done()
        references[rank].ended.set_result(f"of {rank}")
    assert following.wait(timeout=60.0) == ["of 0", "of 1", "of 2"]
