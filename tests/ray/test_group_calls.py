"""Calls on a group of 2 x 2 real workers: who is called, with what, how often it is stored, and who answers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import ray
from ray import ObjectRefGenerator

from tests.ray.actors import TwoArguments
from workers import MultiWorkerFuture, NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup
from workers.transport import waiting

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
DATA, TENSOR = "data_parallel", "tensor_parallel"
SHARDING = NamedSharding([[0, 1], [2, 3]], [DATA, TENSOR])


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder("tests.ray.actors.Member"),
            name_prefix="member",
            sharding_annotations=SHARDING,
        ) as made,
    ):
        yield made


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that are put in the object store."""
    stored: list[Any] = []
    put = ray.put

    def counted(value: Any) -> Any:
        stored.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    return stored


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    """A FIFO per rank, on which workers wait."""
    for rank in range(4):
        os.mkfifo(tmp_path / str(rank))
    return tmp_path


def open_gates(gates: Path, ranks: list[int]) -> None:
    for rank in ranks:
        with open(gates / str(rank), "w"):
            pass


def calls(group: RayWorkerGroup) -> list[int]:
    return ray.get(group.run_all_workers_single_data("calls"))


# --- who is called, with what ---------------------------------------------------------------------------------


def test_shards_and_their_leaders(group: RayWorkerGroup) -> None:
    assert [entry["name"] for entry in group.worker_metadata] == [f"member-0-{rank}" for rank in range(4)]
    assert [entry["dp_shard_idx"] for entry in group.worker_metadata] == [0, 0, 1, 1]
    assert len(group.workers) == 4
    assert group.dp_size == 2
    assert [group.get_dp_leader_worker_idx(shard) for shard in range(2)] == [0, 2]
    for shard in (2, -1):
        with pytest.raises(IndexError, match=f"shard {shard} does not exist"):
            group.get_dp_leader_worker_idx(shard)


def test_a_single_worker(group: RayWorkerGroup) -> None:
    assert ray.get(group.run_single_worker_single_data("echo", 2, "a", b=1)) == (2, ("a",), {"b": 1})
    for worker in (4, -1):
        with pytest.raises(IndexError, match=f"worker {worker} does not exist"):
            group.run_single_worker_single_data("echo", worker)


def test_all_workers_with_the_same_data(group: RayWorkerGroup) -> None:
    assert ray.get(group.run_all_workers_single_data("echo", [1], b="x")) == [
        (rank, ([1],), {"b": "x"}) for rank in range(4)
    ]
    for axes, ranks in (([TENSOR], [0, 2]), ([DATA], [0, 1]), ([DATA, TENSOR], [0]), ([], [0, 1, 2, 3])):
        assert ray.get(group.run_all_workers_single_data("rank", run_rank_0_only_axes=axes)) == ranks


def test_all_workers_with_different_data(group: RayWorkerGroup) -> None:
    got = group.run_all_workers_multiple_data("echo", list("abcd"), b=[1, 2, 3, 4], common_kwargs={"c": 0})
    assert ray.get(got) == [(rank, ("abcd"[rank],), {"b": rank + 1, "c": 0}) for rank in range(4)]
    some = group.run_all_workers_multiple_data("echo", ["x", "y"], b=(1, 2), run_rank_0_only_axes=[TENSOR])
    assert ray.get(some) == [(0, ("x",), {"b": 1}), (2, ("y",), {"b": 2})]


def test_sharded_and_replicated_data(group: RayWorkerGroup) -> None:
    future = group.run_all_workers_sharded_data(
        "echo",
        ["first", "second"],
        in_sharded_axes=[DATA],
        replicate_on_axes=[TENSOR],
        output_is_replicated=[TENSOR],
        common_kwargs={"c": 1},
        b=[{"n": 1}, {"n": 2}],
    )
    assert (future.called_workers, future.return_from_workers) == ([0, 1, 2, 3], [0, 2])
    assert group.get_all_worker_results(future) == [
        (0, ("first",), {"b": {"n": 1}, "c": 1}),
        (2, ("second",), {"b": {"n": 2}, "c": 1}),
    ]
    assert ray.get(future.futures[3]) == (3, ("second",), {"b": {"n": 2}, "c": 1})


def test_data_replicated_on_every_axis(group: RayWorkerGroup) -> None:
    axes = [DATA, TENSOR]
    future = group.run_all_workers_sharded_data("echo", "x", replicate_on_axes=axes)
    assert group.get_all_worker_results(future) == [(rank, ("x",), {}) for rank in range(4)]
    future = group.run_all_workers_sharded_data("rank", replicate_on_axes=axes, output_is_replicated=axes)
    assert group.get_all_worker_results(future) == [0]


def test_several_sharded_axes_take_nested_lists(group: RayWorkerGroup) -> None:
    shards = [["00", "01"], ["10", "11"]]
    future = group.run_all_workers_sharded_data("echo", shards, in_sharded_axes=[DATA, TENSOR])
    assert [args[0] for _, args, _ in group.get_all_worker_results(future)] == ["00", "01", "10", "11"]
    future = group.run_all_workers_sharded_data("echo", shards, in_sharded_axes=[TENSOR, DATA])
    assert [args[0] for _, args, _ in group.get_all_worker_results(future)] == ["00", "10", "01", "11"]


@pytest.mark.parametrize("dummies", [False, True])
def test_free_axes(group: RayWorkerGroup, dummies: bool) -> None:
    future = group.run_all_workers_sharded_data(
        "echo",
        [3, 4],
        in_sharded_axes=[DATA],
        make_dummy_calls_to_free_axes=dummies,
        common_kwargs={"c": 5},
        x=[1, 2],
    )
    assert future.called_workers == ([0, 1, 2, 3] if dummies else [0, 2])
    assert group.get_all_worker_results(future) == [(0, (3,), {"x": 1, "c": 5}), (2, (4,), {"x": 2, "c": 5})]
    if dummies:
        assert ray.get(future.futures[1]) == (1, (None,), {"x": None, "c": 5})


def test_no_axis_at_all_is_the_first_worker(group: RayWorkerGroup) -> None:
    assert group.get_all_worker_results(group.run_all_workers_sharded_data("echo", "x")) == [(0, ("x",), {})]


# --- what is stored -------------------------------------------------------------------------------------------


def test_each_argument_is_stored_once(group: RayWorkerGroup, puts: list[Any]) -> None:
    batch, more = np.arange(1000), {"more": 1}
    got = ray.get(group.run_all_workers_single_data("echo", batch, 7, more=more, scale=0.5, nothing=None))
    assert all(np.array_equal(args[0], batch) for _, args, _ in got)
    assert all((args[1:], kwargs) == ((7,), {"more": more, "scale": 0.5, "nothing": None}) for _, args, kwargs in got)
    assert [id(value) for value in puts] == [id(batch), id(more)]


def test_common_arguments_are_stored_once(group: RayWorkerGroup, puts: list[Any]) -> None:
    group.run_all_workers_multiple_data("echo", list("abcd"), common_kwargs={"c": "common"})
    assert puts == ["common"]


def test_replicated_arguments_are_stored_once_per_distinct_value(group: RayWorkerGroup, puts: list[Any]) -> None:
    def call(*args: Any, **kwargs: Any) -> MultiWorkerFuture:
        return group.run_all_workers_sharded_data("echo", *args, **kwargs)

    call("all", replicate_on_axes=[DATA, TENSOR], common_kwargs={"c": "common"})
    assert puts == ["common", "all"]
    puts.clear()
    call(["first", "second"], in_sharded_axes=[DATA], replicate_on_axes=[TENSOR])
    assert puts == ["first", "second"]
    puts.clear()
    same = ["the", "same"]
    future = call([same, same], b=[same, same], in_sharded_axes=[DATA], replicate_on_axes=[TENSOR])
    assert group.get_all_worker_results(future) == [(rank, (same,), {"b": same}) for rank in range(4)]
    assert puts == [same]


def test_a_reference_is_passed_on_as_its_value(group: RayWorkerGroup) -> None:
    reference = ray.put("stored")
    shared = ray.get(group.run_all_workers_single_data("echo", reference, b=reference))
    assert shared == [(rank, ("stored",), {"b": "stored"}) for rank in range(4)]
    future = group.run_all_workers_sharded_data("echo", [reference, "other"], in_sharded_axes=[DATA])
    assert [args for _, args, _ in group.get_all_worker_results(future)] == [("stored",), ("other",)]


# --- mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"in_sharded_axes": [DATA], "x": [1, 2, 3]},
            "argument x: got 3 shards, expected 2, one per position on axis 'data_parallel'",
        ),
        ({"in_sharded_axes": [DATA], "x": [1]}, "got 1 shards, expected 2, one per position on axis 'data_parallel'"),
        ({"in_sharded_axes": [DATA], "x": 1}, "a list of 2 shards, one per position on axis 'data_parallel', got int"),
        (
            {"in_sharded_axes": [DATA, TENSOR], "x": [[1, 2], [1]]},
            "got 1 shards, expected 2, one per position on axis 'tensor_parallel'",
        ),
        (
            {"in_sharded_axes": [DATA, TENSOR], "x": [1, 2]},
            "a list of 2 shards, one per position on axis 'tensor_parallel', got int",
        ),
        ({"in_sharded_axes": ["experts"], "x": [1]}, "in_sharded_axes: unknown axis 'experts'"),
        ({"replicate_on_axes": ["experts"], "x": 1}, "replicate_on_axes: unknown axis 'experts'"),
        ({"output_is_replicated": ["experts"], "x": 1}, "output_is_replicated: unknown axis 'experts'"),
        ({"in_sharded_axes": DATA, "x": [1, 2]}, "in_sharded_axes must be a list of names of axes, got 'data"),
        ({"in_sharded_axes": [DATA, DATA], "x": [[1, 2], [1, 2]]}, "in_sharded_axes: an axis is named twice"),
        (
            {"in_sharded_axes": [DATA], "replicate_on_axes": [DATA], "x": [1, 2]},
            "'data_parallel' is in in_sharded_axes and in replicate_on_axes; remove it",
        ),
        ({"common_kwargs": {"x": 1}, "x": 1}, "argument x is also in common_kwargs"),
    ],
)
def test_a_sharded_call_that_is_wrong_reaches_nobody(
    group: RayWorkerGroup, puts: list[Any], kwargs: dict[str, Any], message: str
) -> None:
    before = calls(group)
    with pytest.raises(ValueError, match=message):
        group.run_all_workers_sharded_data("echo", **kwargs)
    assert not puts
    assert calls(group) == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"b": [1, 2, 3]}, "argument b: expected a list of 4 values, one for each called worker; got 3"),
        ({"b": [1, 2, 3, 4, 5]}, "a list of 4 values, one for each called worker; got 5"),
        ({"b": "four"}, "a list of 4 values, one for each called worker; got str"),
        ({"b": dict.fromkeys(range(4))}, "a list of 4 values, one for each called worker; got dict"),
        (
            {"b": [1, 2, 3, 4], "run_rank_0_only_axes": [TENSOR]},
            "a list of 2 values, one for each called worker; got 4",
        ),
        ({"b": [1, 2], "run_rank_0_only_axes": ["experts"]}, "run_rank_0_only_axes: unknown axis 'experts'"),
        ({"b": [1, 2, 3, 4], "common_kwargs": {"b": "x"}}, "argument b is also in common_kwargs"),
    ],
)
def test_a_call_with_different_data_that_is_wrong_reaches_nobody(
    group: RayWorkerGroup, puts: list[Any], kwargs: dict[str, Any], message: str
) -> None:
    before = calls(group)
    with pytest.raises(ValueError, match=message):
        group.run_all_workers_multiple_data("echo", **kwargs)
    assert not puts
    assert calls(group) == before


@pytest.mark.parametrize("axes", [["experts"], TENSOR, [TENSOR, TENSOR]])
def test_a_call_with_the_same_data_that_is_wrong_reaches_nobody(
    group: RayWorkerGroup, puts: list[Any], axes: Any
) -> None:
    before = calls(group)
    with pytest.raises(ValueError, match="run_rank_0_only_axes"):
        group.run_all_workers_single_data("echo", [1], run_rank_0_only_axes=axes)
    assert not puts
    assert calls(group) == before


def test_a_method_that_is_not_there(group: RayWorkerGroup) -> None:
    with pytest.raises(AttributeError, match="no attribute 'ekko'"):
        group.run_all_workers_single_data("ekko")


# --- results --------------------------------------------------------------------------------------------------


def test_items_of_generators_come_in_worker_order(group: RayWorkerGroup) -> None:
    future = group.run_all_workers_sharded_data("count_to", [2, 3], in_sharded_axes=[DATA])
    assert group.get_all_worker_results(future) == [0, 1, 0, 1, 2]
    future = group.run_all_workers_sharded_data(
        "ranks_of", [1, 2], in_sharded_axes=[DATA], replicate_on_axes=[TENSOR], output_is_replicated=[TENSOR]
    )
    assert future.get_results(group) == [0, 2, 2]
    everybody = MultiWorkerFuture(group.run_all_workers_single_data("ranks_of", 2))
    assert everybody.get_results(group) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_generators_as_proxies(group: RayWorkerGroup) -> None:
    future = group.run_all_workers_sharded_data(
        "ranks_of", [1, 2], in_sharded_axes=[DATA], replicate_on_axes=[TENSOR], output_is_replicated=[TENSOR]
    )
    proxies = group.get_all_worker_results(future, return_generators_as_proxies=True)
    assert all(isinstance(proxy, ObjectRefGenerator) for proxy in proxies)
    assert [[ray.get(item) for item in proxy] for proxy in proxies] == [[0], [2, 2]]
    plain = group.run_all_workers_sharded_data("rank")
    assert group.get_all_worker_results(plain, return_generators_as_proxies=True) == [0]


@pytest.mark.parametrize("method", ["fail_or_wait", "stream_and_fail_or_wait"])
@pytest.mark.parametrize("output_is_replicated", [[], [TENSOR]], ids=["returned", "dropped"])
def test_a_failing_worker_raises_its_own_exception_while_its_siblings_still_work(
    group: RayWorkerGroup, gates: Path, method: str, output_is_replicated: list[str]
) -> None:
    future = group.run_all_workers_sharded_data(
        method,
        replicate_on_axes=[DATA, TENSOR],
        output_is_replicated=output_is_replicated,
        common_kwargs={"rank": 3, "gates": str(gates)},
    )
    with pytest.raises(KeyError, match="told to fail") as caught:  # the others wait at their gates
        group.get_all_worker_results(future)
    assert type(caught.value) is KeyError
    assert "fail_or_wait" in str(caught.value.__cause__)  # where it was raised
    assert caught.value.__notes__ == ["raised by worker member-0-3"]
    open_gates(gates, [0, 1, 2])
    assert ray.get(group.run_all_workers_single_data("rank")) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["fail_with_two", "stream_and_fail_with_two"])
def test_an_exception_that_pickle_cannot_make_anew_arrives_as_itself(group: RayWorkerGroup, method: str) -> None:
    future = group.run_all_workers_sharded_data(method)
    with pytest.raises(TwoArguments, match=r"^code 0: as told\n") as caught:
        group.get_all_worker_results(future)
    assert (type(caught.value), caught.value.code) == (TwoArguments, 0)
    assert caught.value.__notes__ == ["raised by worker member-0-0"]
    assert ray.get(group.run_all_workers_single_data("catch_its_own")) == [0, 1, 2, 3]


class Told(BaseException):
    """Raised by a signal's handler."""


def test_a_signal_is_heard_while_workers_are_waited_for(group: RayWorkerGroup, gates: Path) -> None:
    def tell(*_: object) -> None:
        raise Told

    before = signal.signal(signal.SIGUSR1, tell)
    try:
        with pytest.raises((Told, SystemError)):  # Ray makes the one into the other where it was waiting
            group.run_all_workers_sharded_data(
                "signal_and_wait", common_kwargs={"process": os.getpid(), "gates": str(gates)}
            ).get_results(group)
    finally:
        signal.signal(signal.SIGUSR1, before)
    open_gates(gates, [0])
    assert ray.get(group.run_single_worker_single_data("rank", 0)) == 0


def test_a_log_line_names_who_is_waited_for(
    group: RayWorkerGroup, gates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.0625)
    lines: list[str] = []
    logged = Event()

    def log(_: int, text: str, *values: object) -> None:
        lines.append(text % values)
        logged.set()

    def open_once_logged() -> None:
        logged.wait(60)
        open_gates(gates, [2])

    monkeypatch.setattr(waiting._log, "log", log)
    opener = Thread(target=open_once_logged)
    opener.start()
    future = group.run_single_worker_single_data("wait_at", 2, str(gates))
    assert group.get_all_worker_results(MultiWorkerFuture([future], called_workers=[2])) == [None]
    opener.join()
    assert re.fullmatch(r"a call on member-0-2: waiting for \d+ s so far", lines[0])


def test_lists_of_futures_are_for_ray_get(group: RayWorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"expected the MultiWorkerFuture .* got list; pass a list of futures to ray"):
        group.get_all_worker_results(group.run_all_workers_single_data("rank"))  # type: ignore[arg-type]


def test_a_wait_with_a_bound_names_who_is_late(group: RayWorkerGroup, gates: Path) -> None:
    future = MultiWorkerFuture([group.run_single_worker_single_data("wait_at", 2, str(gates))], called_workers=[2])
    with pytest.raises(TimeoutError, match=r"a call on member-0-2: not done within 0\.1 s"):
        future.get_results(group, timeout_s=0.1)
    open_gates(gates, [2])
    assert future.get_results(group, timeout_s=60.0) == [None]


def forget_an_error(group: RayWorkerGroup, method: str) -> None:
    forgotten = group.run_single_worker_single_data(method, 0)
    ray.get(group.run_single_worker_single_data("rank", 0))
    del forgotten
