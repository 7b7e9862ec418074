"""Where `dataplane.compat.transfer_queue` is meant to differ from the package, what is its own, and that its names,
arguments and defaults are the package's."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from tensordict import TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane import serve
from dataplane.compat.transfer_queue import session
from dataplane.compat.transfer_queue.session import current_client
from dataplane.compat.transfer_queue.settings import Settings
from dataplane.errors import CheckpointError, PartitionDroppedError
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
SMALL = {"capacity_bytes": 32 * MIB}

Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`init` with these settings of the controller; closed afterwards."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "1")

    def init(**controller: Any) -> Any:
        return tq.init({"controller": controller, "dataplane": SMALL})

    yield init
    tq.close()


@pytest.fixture
def client(start: Start) -> tq.TransferQueueClient:
    start()
    return tq.get_client()


def values(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"v": torch.arange(first, first + count)}, batch_size=count)


# --- the interface


def test_all_names_arguments_and_defaults_of_the_package_are_here() -> None:
    original = pytest.importorskip("transfer_queue")
    assert original.__version__ == tq.__version__
    assert set(original.__all__) <= set(tq.__all__)
    for name in original.__all__:
        theirs, ours = getattr(original, name), getattr(tq, name)
        if inspect.isclass(theirs):
            for method, function in inspect.getmembers(theirs, inspect.isfunction):
                if not method.startswith("_"):
                    assert begins_with(arguments(getattr(ours, method)), arguments(function)), f"{name}.{method}"
        else:
            assert arguments(ours) == arguments(theirs), name


@pytest.mark.parametrize("name", ["kv_put", "kv_list", "TransferQueueClient.get_meta"])
def test_both_forms_of_a_call_have_its_name_and_its_documentation(name: str) -> None:
    owner, _, call = name.rpartition(".")
    place: Any = getattr(tq, owner) if owner else tq
    blocking = getattr(place, call)
    awaited = getattr(place, f"async_{call}")
    assert [blocking.__name__, awaited.__name__] == [call, f"async_{call}"]
    assert blocking.__doc__ == awaited.__doc__
    assert blocking.__doc__
    assert arguments(blocking) == arguments(awaited)
    assert inspect.iscoroutinefunction(awaited)
    assert not inspect.iscoroutinefunction(blocking)


def begins_with(ours: list[Any], theirs: list[Any]) -> bool:
    return ours[: len(theirs)] == theirs


def arguments(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults, but for what the package's decorators inject."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(one.name, one.default) for one in found if one.name not in ("socket", "args", "kwargs")]


# --- one service, many processes


def test_a_name_is_one_and_wants_a_ray_cluster(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "known", list)
    for name in ("", "a b", "a@b", 5):
        with pytest.raises(ValueError, match="letters, digits"):
            start(name=name)
    with pytest.raises(ValueError, match=r"'shared' .* call ray.init\(\)"):
        start(name="shared")


def test_there_is_nothing_before_init_and_after_close(start: Start) -> None:
    for call in (tq.get_client, tq.kv_list, lambda: tq.save_checkpoint("nowhere")):
        with pytest.raises(tq.NotInitializedError, match="init"):
            call()
    conf = start()
    assert conf.controller.zmq_info.address == os.environ["TQ_ADDRESS"]
    assert conf["backend"]["storage_backend"] == "SimpleStorage"
    assert tq.init() is None
    assert tq.get_metrics_endpoint() is None
    tq.close()
    tq.close()
    assert "TQ_ADDRESS" not in os.environ
    with pytest.raises(AssertionError, match="init"):
        tq.get_client()


@pytest.mark.slow
def test_a_child_process_finds_the_service_of_its_parent(start: Start) -> None:
    tq.init({"controller": {"polling_mode": True}, "metrics": {"enabled": True}, "dataplane": SMALL})
    tq.kv_put("a", "p", {"v": torch.tensor([1, 2])}, {"n": 1})
    child = """
import sys, torch, dataplane.compat.transfer_queue as tq
assert tq.get_metrics_endpoint() == sys.argv[1]
assert tq.kv_list("p") == {"p": {"a": {"n": 1}}}
assert tq.init() is None
assert tq.get_client().get_meta(["v"], 9, "p", task_name="t").size == 0, "polling is what the parent said"
tq.kv_put("b", "p", {"v": torch.tensor([3])})
tq.close()
"""
    told = [sys.executable, "-c", child, str(tq.get_metrics_endpoint())]
    done = subprocess.run(told, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(tq.kv_list("p")["p"]) == {"a", "b"}


def test_who_attaches_gets_the_settings_of_who_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(SMALL) as server:
        named = {"dataplane": {"address": server.address}}
        conf = {**named, "controller": {"sampler": tq.GRPOGroupNSampler(2), "polling_mode": True}}
        assert tq.init(conf) is conf
        tq.close()
        tq.init({**named, "controller": {"sampler": "SequentialSampler"}})
        try:
            client = tq.get_client()
            client.put(values(3), partition_id="p")
            with pytest.raises(ValueError, match="n_samples_per_prompt=2"):
                client.get_meta(["v"], 3, "p", task_name="t")
            assert client.get_meta(["v"], 4, "p", task_name="t").size == 0
        finally:
            tq.close()
        other = tq.TransferQueueClient("other", server.address)
        assert other.get_partition_list() == ["p"]
        other.close()


def test_settings_that_nobody_has_are_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="'NoSampler'"):
        start(sampler="NoSampler")
    with pytest.raises(ValueError, match="'Disk'"):
        tq.init({"backend": {"storage_backend": "Disk"}})
    with pytest.raises(ValueError, match="unknown data plane settings"):
        tq.init({"dataplane": {"no_such": 1}})
    with pytest.raises(ValueError, match="controller_info"):
        tq.TransferQueueClient("c", None)
    with pytest.raises(TypeError, match="controller_info"):
        tq.TransferQueueClient("c", 5)


def test_the_metrics_are_where_it_says(start: Start) -> None:
    assert tq.get_metrics_endpoint() is None
    settings = tq.init({"metrics": {"enabled": True}, "dataplane": SMALL})
    tq.kv_put("a", "p", tag={"n": 1})
    endpoint = tq.get_metrics_endpoint()
    assert settings is not None
    assert settings["metrics"]["endpoint"] == endpoint
    with urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
        assert b'partition="p"' in answer.read()


def test_settings_of_omegaconf_are_taken(start: Start) -> None:
    omega = pytest.importorskip("omegaconf").OmegaConf
    conf = omega.create({"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"total_storage_size": 5}}})
    settings = Settings.of(conf)
    assert settings.controller.polling_mode is True
    assert settings.backend.SimpleStorage.total_storage_size == 5
    with pytest.raises(AttributeError, match="nothing"):
        _ = settings.nothing


# --- all or error


def test_a_strict_read_names_all_or_is_an_error(start: Start) -> None:
    tq.init({"strict_reads": True, "dataplane": SMALL})
    tq.kv_batch_put(["a", "b"], "p", values(2))
    tq.kv_put("a", "p", {"w": torch.tensor(1.0)})
    with pytest.raises(KeyError, match="'c'"):
        tq.kv_batch_get(["a", "c"], "p")
    with pytest.raises(tq.StorageKeyNotFoundError, match=r"'w'.*'b'"):
        tq.kv_batch_get(["a", "b"], "p", ["v", "w"])
    with pytest.raises(tq.StorageKeyNotFoundError, match="'x'"):
        tq.kv_batch_get(["a", "b"], "p", ["v", "x"])
    tq.kv_batch_put(["late"], "p", tags=[{}])
    with pytest.raises(ValueError, match="no field in common"):
        tq.kv_batch_get(["a", "late"], "p")


def test_a_read_says_once_what_it_leaves_out(client: tq.TransferQueueClient, caplog: pytest.LogCaptureFixture) -> None:
    tq.kv_batch_put(["a", "b"], "p", values(2))
    for _ in range(2):
        data = tq.kv_batch_get(["a", "z", "b"], "p", ["v", "values"])
        assert data["v"].tolist() == [0, 1]
    said = [record.getMessage() for record in caplog.records if "strict_reads" in record.getMessage()]
    assert len(said) == 2
    assert "'z'" in said[0]
    assert "'values'" in said[1]
    with pytest.raises(ValueError, match="were not found: partition 'p' has none of the keys 'z'"):
        tq.kv_batch_get(["z"], "p")
    with pytest.raises(ValueError, match=r"select_fields.*not found"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}], "p", ["v"]), "x")


def test_a_meta_of_cleared_samples_never_means_others(client: tq.TransferQueueClient) -> None:
    old = client.put(values(2), partition_id="p")
    client.clear_samples(old)
    new = client.put(values(2, 10), partition_id="p")
    assert not set(old.global_indexes) & set(new.global_indexes)
    for call in (lambda: client.get_data(old), lambda: client.put(values(2), metadata=old)):
        with pytest.raises(tq.StorageKeyNotFoundError):
            call()
    by_index = tq.BatchMeta(new.global_indexes, ["p", "p"], new.field_schema)
    assert client.get_data(by_index)["v"].tolist() == [10, 11]
    with pytest.raises(tq.StorageKeyNotFoundError, match="indexes"):
        client.get_data(tq.BatchMeta(old.global_indexes, ["p", "p"], new.field_schema))
    client.clear_samples(old)
    assert client.get_data(new)["v"].tolist() == [10, 11]


def test_a_parser_returns_the_fields_that_it_was_given(client: tq.TransferQueueClient) -> None:
    fields = TensorDict({"v": torch.ones(1, 1)}, batch_size=1)
    with pytest.raises(TypeError, match="must return the dict"):
        tq.kv_batch_put(["c"], "p", fields, data_parser=lambda fields: None)
    with pytest.raises(ValueError, match="neither add nor remove"):
        tq.kv_batch_put(["c"], "p", fields, data_parser=lambda fields: {})
    assert tq.kv_list("p") == {}


# --- batches


def claims_wait() -> bool:
    return any(one.waiting_claims for one in current_client()._performer.client.stats().partitions)


def test_get_meta_waits_on_the_service(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "60")
    start()
    client = tq.get_client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get_meta, ["v", "w"], 2, "later", task_name="t")
        wait_until(claims_wait)
        made = client.put(values(2), partition_id="later")
        client.put(TensorDict({"w": torch.ones(2)}, batch_size=2), metadata=made)
        assert waiting.result(60).global_indexes == made.global_indexes


def test_get_meta_says_what_was_missing(client: tq.TransferQueueClient) -> None:
    with pytest.raises(tq.FetchTimeoutError, match="'later'") as caught:
        client.get_meta(["v"], 1, "later", task_name="t")
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(ValueError, match="task"):
        client.get_meta(["v"], 1, "later")
    with pytest.raises(ValueError, match="mode"):
        client.get_meta(["v"], 1, "later", mode="steal", task_name="t")


def test_who_waits_for_a_partition_that_is_cleared_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "60")
    start()
    client = tq.get_client()
    client.put(values(1), partition_id="p")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get_meta, ["v"], 5, "p", task_name="t")
        wait_until(claims_wait)
        client.clear_partition("p")
        with pytest.raises(PartitionDroppedError):
            waiting.result(60)


@pytest.mark.parametrize("polling", [True, False])
def test_each_sample_goes_to_one_batch_of_a_task(start: Start, polling: bool) -> None:
    start(polling_mode=polling)
    client = tq.get_client()
    made = client.put(values(60), partition_id="p")
    begin = threading.Barrier(6)

    def take() -> list[int]:
        begin.wait(60)
        metas = [client.get_meta(["v"], 2, "p", task_name="t") for _ in range(5)]
        return [index for meta in metas for index in meta.global_indexes]

    with ThreadPoolExecutor(6) as pool:
        taken = [pool.submit(take) for _ in range(6)]
    assert sorted(index for part in taken for index in part.result()) == made.global_indexes


def test_processes_of_a_rank_get_the_same_batch_whoever_asks_first(start: Start) -> None:
    conf = start(sampler=tq.RankAwareSampler, polling_mode=True)
    tq.get_client().put(values(12), partition_id="p")
    clients = [tq.TransferQueueClient(f"c{number}", conf.controller.zmq_info) for number in range(4)]
    begin = threading.Barrier(len(clients))

    def ask(number: int) -> tuple[int, list[int]]:
        begin.wait(60)
        config = {"dp_rank": number % 2, "batch_index": 0}
        meta = clients[number].get_meta(["v"], 3, "p", task_name="t", sampling_config=config)
        return number % 2, meta.global_indexes

    try:
        with ThreadPoolExecutor(len(clients)) as pool:
            got = list(pool.map(ask, range(len(clients))))
    finally:
        for client in clients:
            client.close()
    by_rank = [{tuple(indexes) for rank, indexes in got if rank == wanted} for wanted in range(2)]
    assert [len(batches) for batches in by_rank] == [1, 1]
    assert len({index for batches in by_rank for batch in batches for index in batch}) == 6
    client = tq.get_client()
    consumed = client.get_consumption_status("t", "p")[1]
    assert consumed is not None
    assert int(consumed.sum()) == 6
    client.clear_partition("p")
    client.put(values(3), partition_id="p")
    config = {"dp_rank": 0, "batch_index": 0}
    assert client.get_meta(["v"], 3, "p", task_name="t", sampling_config=config).size == 3
    with pytest.raises(ValueError, match="batch_index"):
        client.get_meta(["v"], 3, "p", task_name="t", sampling_config={"dp_rank": 0})


class Newest(tq.BaseSampler):
    """The newest ones, best first by a tag."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        tags = partition.get_custom_meta(ready_indexes)
        best = sorted(ready_indexes[-kwargs["window"] :], key=lambda index: -tags[index]["score"])
        return best[:batch_size], best


def test_a_sampler_of_the_users_own(start: Start) -> None:
    conf = start(sampler=Newest(), polling_mode=False)
    client = tq.get_client()
    made = client.get_meta(["v"], 4, "p", mode="insert")
    made.update_custom_meta([{"score": score} for score in (9, 1, 3, 2)])
    client.put(values(4), metadata=made)
    batch = client.get_meta(["v"], 2, "p", task_name="t", sampling_config={"window": 3})
    assert batch.global_indexes == [made.global_indexes[2], made.global_indexes[3]]
    status = client.get_consumption_status("t", "p")[1]
    assert status is not None
    assert status.tolist() == [0, 1, 1, 1]
    other = tq.TransferQueueClient("without", conf.controller.zmq_info)
    try:
        with pytest.raises(ValueError, match="Newest: pass it to init"):
            other.get_meta(["v"], 1, "p", task_name="t")
    finally:
        other.close()


class Backwards(tq.SequentialSampler):
    """The newest ones."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        return super().sample(ready_indexes[::-1], batch_size)


@pytest.mark.parametrize("polling", [True, False])
def test_a_sampler_that_inherits_from_one_that_is_there(start: Start, polling: bool) -> None:
    start(sampler=Backwards, polling_mode=polling)
    client = tq.get_client()
    made = client.put(values(4), partition_id="p")
    taken = [client.get_meta(["v"], 2, "p", task_name="t").global_indexes for _ in range(2)]
    assert taken[0] + taken[1] == made.global_indexes[::-1]


def test_a_partition_is_not_consumed_before_all_expected_samples_came(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "3")
    start()
    client = tq.get_client()
    client.put(values(2), partition_id="p")
    client.get_meta(["v"], 2, "p", task_name="t")
    indexes, status = client.get_consumption_status("t", "p")
    assert indexes is not None
    assert status is not None
    assert indexes.tolist()[-1] == -1
    assert status.tolist() == [1, 1, 0]
    assert not client.check_consumption_status("t", "p")
    client.put(values(1), partition_id="p")
    client.get_meta(["v"], 1, "p", task_name="t")
    assert client.check_consumption_status("t", "p")
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "many")
    tq.close()
    with pytest.raises(ValueError, match="TQ_PRE_ALLOC_SAMPLE_NUM"):
        start()


def test_ranks_that_ask_late_still_get_their_share_from_a_loader(start: Start) -> None:
    conf = start(sampler=tq.SeqlenBalancedSampler(dp_size=2), polling_mode=True)
    tq.get_client().put(values(6), partition_id="p")
    seen = []
    for rank in range(2):
        dataset = tq.StreamingDataset(conf, 3, 2, ["v"], "p", "t", rank, should_check_consumption_status=True)
        loader = tq.StreamingDataLoader(dataset)
        parts = [(data["v"].tolist(), meta.size) for data, meta in loader]
        assert [len(part) for part, _ in parts] == [size for _, size in parts] == [2, 1]
        seen += [value for part, _ in parts for value in part]
    assert sorted(seen) == list(range(6))


def test_halves_of_a_checkpoint_are_refused(client: tq.TransferQueueClient) -> None:
    for verb in ("save", "load", "async_save", "async_load"):
        for half in ("controller", "storage"):
            with pytest.raises(NotImplementedError, match="call the module's save_checkpoint"):
                getattr(client, f"{verb}_{half}_checkpoint")("/nowhere")


def test_a_damaged_checkpoint_changes_nothing(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b"], "p", values(2))
    tq.save_checkpoint(tmp_path / "c", include_storage=False)
    [data] = (tmp_path / "c" / "samples").glob("data-*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    tq.kv_clear("a", "p")
    tq.kv_put("n", "other", {"v": torch.tensor([1])})
    with pytest.raises(CheckpointError, match=data.name):
        tq.load_checkpoint(tmp_path / "c")
    assert tq.kv_list() == {"p": {"b": {}}, "other": {"n": {}}}


def test_an_interrupted_save_leaves_the_checkpoint_before_it(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_put("a", "p", {"v": torch.tensor([1])})
    tq.save_checkpoint(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / "c.old")
    tq.kv_clear("a", "p")
    tq.load_checkpoint(tmp_path / "c")
    assert tq.kv_list("p") == {"p": {"a": {}}}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]


def test_arguments_of_another_kind_are_named(start: Start) -> None:
    with pytest.raises(TypeError, match="conf=3: expected a mapping of settings or None, got int"):
        tq.init(3)  # type: ignore[arg-type]
    for conf, named in (
        ({"controller": None}, "controller=None: expected a mapping of settings"),
        ({"strict_reads": "false"}, "strict_reads='false': expected True or False, got str"),
        ({"controller": {"polling_mode": 1}}, "controller.polling_mode=1: expected True or False, got int"),
        ({"metrics": {"enabled": "no"}}, "metrics.enabled='no'"),
    ):
        with pytest.raises(TypeError, match=named):
            tq.init(conf)
    start()
    client = tq.get_client()
    for mode in ("fetch", "insert"):
        with pytest.raises(RuntimeError, match="batch_size='2': expected an int, got str"):
            client.get_meta(["x"], batch_size="2", partition_id="p", mode=mode, task_name="t")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [["p"], 5, b"p"])
def test_a_partition_key_or_field_of_another_type_is_refused_by_name(
    client: tq.TransferQueueClient, wrong: Any
) -> None:
    tq.kv_batch_put(["a", "b"], "p", values(2))
    calls = {
        "partition_id": [
            lambda: tq.kv_put("a", wrong, {"v": torch.tensor(1)}),
            lambda: tq.kv_batch_put(["a", "b"], wrong, values(2)),
            lambda: tq.kv_batch_get(["a"], wrong),
            lambda: tq.kv_clear(["a"], wrong),
            lambda: tq.kv_list(wrong),
            lambda: client.get_meta(["v"], 1, wrong, task_name="t"),
            lambda: client.get_meta(["v"], 1, wrong, mode="insert"),
            lambda: client.put(values(1), partition_id=wrong),
            lambda: client.clear_partition(wrong),
            lambda: client.kv_retrieve_meta(["a"], wrong),
        ],
        "task_name": [lambda: client.get_meta(["v"], 1, "p", task_name=wrong)],
        "key": [lambda: tq.kv_put(wrong, "p", {"v": torch.tensor(1)})],
        "data_fields, row 0": [lambda: client.get_meta([wrong], 1, "p", task_name="t")],
        "select_fields, row 0": [lambda: tq.kv_batch_get(["a"], "p", [wrong])],
    }
    for argument, refused in calls.items():
        for call in refused:
            message = f"argument {argument}: {type(wrong).__name__} .* is not supported"
            with pytest.raises(TypeError, match=message):
                call()
    assert tq.kv_list() == {"p": {"a": {}, "b": {}}}


WRONG = ("KVBatchMeta", "BatchMeta", "TensorDict", "TransferQueueClient", "int")


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_passed_to_the_wrong_argument_is_refused_with_what_is_expected(
    client: tq.TransferQueueClient, wrong: str
) -> None:
    meta = tq.kv_batch_put(["a", "b"], "p", values(2))
    claimed = client.get_meta(["v"], 2, "p", task_name="t")
    given = (meta, claimed, values(2), client, 5)
    [value] = [each for each in given if type(each).__name__ == wrong]
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "metadata: expected a BatchMeta": [
            client.get_data,
            client.set_custom_meta,
            client.clear_samples,
            lambda other: client.put(values(2), metadata=other),
        ],
        "data: expected a TensorDict": [lambda other: client.put(other, partition_id="p")],
        "meta: expected a KVBatchMeta": [tq.kv_batch_get_by_meta],
        "fields: expected a TensorDict": [lambda other: tq.kv_batch_put(["a", "b"], "p", other)],
        "tags: expected a list of mappings": [
            lambda other: tq.kv_batch_put(["a", "b"], "p", tags=other),
        ],
        "checkpoint_dir: expected a path": [tq.save_checkpoint, tq.load_checkpoint],
        "data_parser: expected a function": [
            lambda other: tq.kv_put("a", "p", {"v": torch.tensor(1)}, data_parser=other),
        ],
    }
    for message, refused in calls.items():
        for call in refused:
            if f"expected a {wrong}" not in message:
                with pytest.raises(TypeError, match=f"{message}.*, got {wrong}"):
                    call(value)
    assert sorted(tq.kv_list()["p"]) == ["a", "b"]
