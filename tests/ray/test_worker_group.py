"""Groups of workers: the launch, calls of their methods, what those raise."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.ray.actors import AsyncTalker, NeedsTwo, Talker
from workers import Cluster, NodePlacementStrategy, Worker, WorkerGroup
from workers.errors import CallWaitTimeoutError, GroupEndedError, NoSuchRankError, WorkerExitError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
SIZE = 3


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[Cluster]:
    with Cluster(num_nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup[Talker]]:
    made = Talker.create_group("good day").launch(cluster, NodePlacementStrategy([0] * SIZE), name="calls")
    with made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Path]:
    """FIFOs that workers wait at; what still waits when the test ends is let go."""
    for rank in range(SIZE):
        os.mkfifo(tmp_path / str(rank))
    yield tmp_path
    for rank in range(SIZE):
        os.close(os.open(tmp_path / str(rank), os.O_RDWR))


def open_gates(gates: Path, *ranks: int) -> None:
    for rank in ranks:
        with open(gates / str(rank), "w"):
            pass


# --- the launch ---------------------------------------------------------------------------------------------------


def test_workers_know_their_place(group: WorkerGroup[Talker]) -> None:
    seen = group.place().wait()
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in seen] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["NODE_RANK"]) for env in seen} == {("3", "3", "0")}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in seen}) == 1
    assert group.execute_on(2).attributes().wait() == [
        (2, SIZE, "calls", 0, 2, -1, "calls:2", True, None, None),
    ]


def test_the_environment_is_right_for_torch_distributed(group: WorkerGroup[Talker]) -> None:
    assert group.all_reduce().wait() == [6.0] * SIZE


def test_what_a_group_tells_of_itself(group: WorkerGroup[Talker]) -> None:
    assert (group.worker_group_name, group.worker_cls_name) == ("calls", "Talker")
    assert [info.rank for info in group.worker_info_list] == [0, 1, 2]
    assert Worker.current_worker is None


def test_a_class_that_has_a_groups_own_method_is_refused() -> None:
    class Taken(Worker):
        def launch(self) -> None: ...

    with pytest.raises(ValueError, match=r"Taken has methods .*'launch'"):
        Taken.create_group()


def test_a_worker_belongs_to_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"create_group\(...\).launch\(...\)"):
        Talker()


# --- calls --------------------------------------------------------------------------------------------------------


def test_methods_are_called_on_all_in_rank_order(group: WorkerGroup[Talker]) -> None:
    assert group.greet("you", mark="?").wait() == [f"good day you from {rank}?" for rank in range(SIZE)]
    assert group.add(1, 2).wait() == [3] * SIZE
    assert group.size_of(torch.zeros(50_000)).wait() == [50_000] * SIZE


def test_the_next_call_is_on_the_ranks_named_in_their_order(group: WorkerGroup[Talker]) -> None:
    assert group.execute_on(2, 0).rank().wait() == [2, 0]
    assert group.rank().wait() == [0, 1, 2]
    assert group.execute_on().rank().wait() == [0, 1, 2]
    method = group.execute_on(1).rank
    assert [method().wait(), method().wait()] == [[1], [0, 1, 2]]
    group.execute_on(1)
    assert group.rank().wait() == [1]


@pytest.mark.parametrize("ranks", [(0, SIZE), (-1,), (True,), ("0",)])
def test_a_rank_that_is_not_there_leaves_nothing_behind(group: WorkerGroup[Talker], ranks: tuple[int, ...]) -> None:
    group.execute_on(1)
    with pytest.raises(NoSuchRankError, match="it has 3 workers") as caught:
        group.execute_on(*ranks)
    assert isinstance(caught.value, IndexError)
    assert group.rank().wait() == [0, 1, 2]


def test_what_is_no_method_leaves_nothing_behind(group: WorkerGroup[Talker]) -> None:
    for name in ("nothing", "kind", "worker_address", "_close"):
        with pytest.raises(AttributeError, match=f"Talker has no public method '{name}'"):
            getattr(group.execute_on(1), name)
        assert group.rank().wait() == [0, 1, 2]
    with pytest.raises(TypeError, match="missing a required argument: 'name'"):
        group.execute_on(1).greet()
    assert group.rank().wait() == [0, 1, 2]


def test_threads_name_ranks_for_their_own_calls(group: WorkerGroup[Talker]) -> None:
    named = threading.Barrier(SIZE)

    def on(rank: int) -> list[int]:
        group.execute_on(rank)
        named.wait(30)
        found: list[int] = group.rank().wait()
        return found

    with ThreadPoolExecutor(SIZE) as threads:
        assert list(threads.map(on, range(SIZE))) == [[0], [1], [2]]
        elsewhere = threads.submit(group.execute_on(2).rank)
        assert elsewhere.result().wait() == [2]
    assert group.rank().wait() == [0, 1, 2]


@pytest.mark.slow
def test_async_methods_run_at_the_same_time(cluster: Cluster) -> None:
    with AsyncTalker.create_group().launch(cluster, name="async") as group:
        waiting = group.wait_for_open()
        assert not waiting.done()
        assert group.open().wait() == [None]
        assert waiting.wait() == ["opened on 0"]
        with pytest.raises(NeedsTwo, match="code 1: in async code"):
            group.fail().wait()
        with pytest.raises(WorkerExitError):
            group.exit().wait()
        with pytest.raises(TypeError, match="count is an asynchronous generator"):
            group.count().wait()
        assert group.plain().wait() == [0]


# --- handles ------------------------------------------------------------------------------------------------------


def test_async_wait_leaves_the_event_loop_free(group: WorkerGroup[Talker], gates: Path) -> None:
    async def both() -> tuple[list[int], list[int]]:
        waiting = asyncio.ensure_future(group.execute_on(0).wait_at(str(gates)).async_wait())
        other = await group.execute_on(1).rank().async_wait()
        await asyncio.to_thread(open_gates, gates, 0)
        return await waiting, other

    assert asyncio.run(both()) == ([0], [1])


class Logged(Exception):
    """Raised by a log, so that nobody has to wait for more of it."""


def test_waits_that_end_before_the_call(
    group: WorkerGroup[Talker], gates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(_: int, text: str, *values: object) -> None:
        raise Logged(text % values)

    call = group.execute_on(0).wait_at(str(gates))
    with pytest.raises(CallWaitTimeoutError, match=r"Talker.wait_at on calls:0: not done within \d+\.\d s"):
        call.wait(timeout=0.01)
    with pytest.raises(CallWaitTimeoutError):
        asyncio.run(call.async_wait(timeout=0.01))
    with monkeypatch.context() as often:
        often.setattr("workers.transport.waiting.LOG_EVERY_S", 0.02)
        often.setattr("workers.transport.waiting._log.log", log)
        for wait in (call.wait, lambda timeout: asyncio.run(call.async_wait(timeout))):
            with pytest.raises(Logged, match=r"Talker.wait_at on calls:0: waiting for"):
                wait(timeout=60)
    assert not call.done()
    open_gates(gates, 0)
    assert [call.wait(), call.wait(), asyncio.run(call.async_wait())] == [[0]] * 3
    assert call.done()


def test_what_follows_a_call(group: WorkerGroup[Talker]) -> None:
    called = threading.Event()
    assert group.rank().then(sum).wait() == 3
    assert group.rank().then(called.set).wait() is None
    assert called.is_set()
    assert group.rank().then(lambda ranks: group.execute_on(*ranks[1:]).rank().wait()).then(len).wait() == 2
    after = group.fail("it").then(lambda _: pytest.fail("called after an error"))
    with pytest.raises(KeyError, match="it"):
        after.wait()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(group.rank().then(lambda _: 1 / 0).async_wait())


def test_durations(group: WorkerGroup[Talker]) -> None:
    first, second = group.timed(), group.rank()
    durations = first.consume_durations()
    assert set(durations) == {"timed", "part", "inner"}
    assert durations["timed"] >= durations["part"] > 0
    reduced, each = second.consume_durations("min", return_per_rank=True)
    assert len(each) == SIZE
    assert reduced == {"rank": min(one["rank"] for one in each)}
    assert second.consume_durations() == {}
    assert group.rank().consume_duration("mean") > 0
    with pytest.raises(ValueError, match="max, min, mean"):
        group.rank().consume_durations("median")


# --- what is raised -----------------------------------------------------------------------------------------------


def test_an_exception_arrives_as_itself(group: WorkerGroup[Talker]) -> None:
    with pytest.raises(KeyError) as caught:
        group.execute_on(1).fail("it").wait()
    assert (type(caught.value), caught.value.args) == (KeyError, ("it",))
    (note,) = caught.value.__notes__
    assert note.startswith("raised by worker calls:1 in Talker.fail:")
    assert "raise KeyError(kind)" in note
    assert group.rank().wait() == [0, 1, 2]


def test_one_that_cannot_be_pickled_arrives_too(group: WorkerGroup[Talker]) -> None:
    with pytest.raises(NeedsTwo, match=r"^code 2: as told\n") as caught:
        asyncio.run(group.execute_on(2).fail("odd").async_wait())
    assert caught.value.code == 2
    assert "lock" in str(caught.value.lock)
    with pytest.raises(TypeError, match="pickle"):
        group.execute_on(2).fail("unsendable result").wait()


def test_what_a_generator_yields_is_a_list(group: WorkerGroup[Talker]) -> None:
    assert group.count_to(3).wait() == [[0, 1, 2]] * 3
    assert group.counted(2).wait() == [0, 0, 0]
    with pytest.raises(NeedsTwo, match="code 0: nothing to count"):
        group.count_to(0).wait()


def test_an_exit_in_a_method_is_the_calls_error(group: WorkerGroup[Talker]) -> None:
    before = group.process().wait()
    with pytest.raises(WorkerExitError, match="SystemExit: 3"):
        group.fail("exit").wait()
    assert group.process().wait() == before


def forget_an_error(group: WorkerGroup[Talker]) -> None:
    forgotten = group.execute_on(0).fail("odd")
    group.execute_on(0).rank().wait()
    del forgotten


def test_the_first_to_fail_is_heard_while_others_work(group: WorkerGroup[Talker], gates: Path) -> None:
    call = group.fail_or_wait(1, str(gates))
    with pytest.raises(KeyError, match="told to fail"):
        call.wait()
    with pytest.raises(KeyError, match="told to fail"):
        asyncio.run(call.async_wait())
    assert call.done()
    open_gates(gates, 0, 2)


# --- the same group elsewhere ---------------------------------------------------------------------------------------


def test_a_group_is_found_by_its_name(group: WorkerGroup[Talker]) -> None:
    found = WorkerGroup.from_group_name(Talker, "calls")
    assert found == group
    assert hash(found) == hash(group)
    assert found.greet("you").wait() == group.greet("you").wait()
    assert found.end_group()


@pytest.mark.slow
def test_a_group_is_sent_to_a_worker(group: WorkerGroup[Talker], cluster: Cluster) -> None:
    assert pickle.loads(pickle.dumps(group)) == group
    with Talker.create_group().launch(cluster, name="caller") as caller:
        assert caller.call(group).wait() == [[0, 1, 2]]
        assert caller.ranks_of("calls").wait() == [[1, 0]]


@pytest.mark.slow
def test_calls_before_the_launch_and_after_the_end(cluster: Cluster) -> None:
    group = Talker.create_group()
    with pytest.raises(RuntimeError, match="has not been launched"):
        group.rank()
    with group.launch(cluster, name="short"):
        assert group.rank().wait() == [0]
        with pytest.raises(RuntimeError, match="launched before"):
            group.launch(cluster)
    with pytest.raises(GroupEndedError, match="'short' has ended"):
        group.rank()
