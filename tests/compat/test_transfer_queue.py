"""Scripts that use the TransferQueue package's interface see the same of the package (0.1.11, with its SimpleStorage
in Ray actors) and of `dataplane.compat.transfer_queue`.

Where the two are meant to differ, tests of this project's alone say so (`test_transfer_queue_own.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane import DataPlaneClient, DataPlaneConfig, FieldSpec, connect, serve
from dataplane.client.operations.partitions import ask
from dataplane.client.rpc.pending_calls import Calls
from dataplane.compat.switch import Replacement
from dataplane.compat.transfer_queue import BatchMeta, KVBatchMeta, operations
from dataplane.compat.transfer_queue.columns import ENCODED
from dataplane.compat.transfer_queue.settings import Settings, defaults, warn_once
from dataplane.core.schema import VARIANTS
from dataplane.errors import FieldNotProducedError, InvalidRequestError, SchemaError, UnsupportedValueError
from dataplane.ledger import commands as c
from tests.compat.conftest import SCRIPTS
from tests.compat.runner import Ours, plain, run_script
from tests.short_ways import short_commands, short_ways_off


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_sees_the_same_of_both(script: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    original, ours = both
    assert "failed" not in original[script], original[script]["failed"]
    assert "failed" not in ours[script], ours[script]["failed"]
    assert ours[script] == original[script]


@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_sees_the_same_both_ways(script: str) -> None:
    module = importlib.import_module(f"tests.compat.scripts.{script}")
    with short_commands() as reached:
        saw = plain(run_script(Ours(tq), module))
    assert reached or script != "keys"  # which has puts and reads of one sample
    with short_ways_off():
        assert plain(run_script(Ours(tq), module)) == saw


# --- Settings and modules of the adapter: what is there under which name, and what is done with what
# is told.


SMALL = {"capacity_bytes": 32 << 20}


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TQ_ADDRESS", "TQ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield
    tq.close()


def test_the_file_of_settings_has_the_defaults() -> None:
    omega = pytest.importorskip("omegaconf").OmegaConf
    with resources.as_file(resources.files("dataplane.compat.transfer_queue") / "config.yaml") as path:
        conf = omega.load(path)
    assert omega.to_container(conf) == defaults()
    assert Settings.of(conf) == Settings.of(None)


def test_all_settings_of_the_package_are_there() -> None:
    package = importlib.util.find_spec("transfer_queue")  # which is not imported: it imports ray
    if package is None or package.origin is None:
        pytest.skip("the package TransferQueue is not installed: make setup installs it")
    omega = pytest.importorskip("omegaconf").OmegaConf
    theirs = omega.to_container(omega.load(Path(package.origin).with_name("config.yaml")))
    ours = defaults()
    assert theirs.keys() <= ours.keys()
    for section, settings in theirs.items():
        assert {name: ours[section][name] for name in settings} == settings


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("client", ["TransferQueueClient", "AsyncTransferQueueClient"]),
        ("dataloader", ["StreamingDataLoader", "StreamingDataset"]),
        ("dataloader.streaming_dataloader", ["StreamingDataLoader"]),
        ("dataloader.streaming_dataset", ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]),
        ("interface", ["kv_put", "kv_batch_get"]),
        ("metadata", ["BatchMeta", "KVBatchMeta", "extract_field_schema"]),
        ("sampler", ["BaseSampler", "SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler"]),
        ("sampler.base", ["BaseSampler"]),
        ("sampler.grpo_group_n_sampler", ["GRPOGroupNSampler"]),
        ("sampler.rank_aware_sampler", ["RankAwareSampler"]),
        ("sampler.seqlen_balanced_sampler", ["SeqlenBalancedSampler"]),
        ("sampler.sequential_sampler", ["SequentialSampler"]),
        ("utils.enum_utils", ["ExplicitEnum", "ProductionStatus", "Role"]),
        ("utils.logging_utils", ["get_logger"]),
    ],
)
def test_modules_are_there_under_the_names_of_the_package(module: str, names: list[str]) -> None:
    ours = importlib.import_module(f"dataplane.compat.transfer_queue.{module}")
    for name in names:
        assert getattr(ours, name) is getattr(tq, name, getattr(ours, name))


def test_helpers_of_the_package() -> None:
    enums = importlib.import_module("dataplane.compat.transfer_queue.utils.enum_utils")
    assert enums.Role("TransferQueueClient") is enums.Role.CLIENT
    with pytest.raises(ValueError, match="'nobody': expected one of"):
        enums.Role("nobody")
    logs = importlib.import_module("dataplane.compat.transfer_queue.utils.logging_utils")
    logger = logs.get_logger("tests.compat.some", "INFO")
    assert logger is logging.getLogger("tests.compat.some")
    assert logger.level == logging.INFO


@pytest.mark.parametrize("dataplane", [DataPlaneConfig(http_port=7), {"http_port": 7}])
def test_settings_of_the_service_are_a_mapping_or_a_config(dataplane: Any) -> None:
    assert Settings.of({"dataplane": dataplane}).service().http_port == 7
    assert Settings.of({"dataplane": None}).service() == DataPlaneConfig()


def test_a_setting_that_is_not_used_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    backend = {
        "SimpleStorage": {"total_storage_size": 7, "num_data_storage_units": 2, "zmq_info": {"a": 1}},
        "MooncakeStore": {"protocol": "rdma", "offload": {"enabled": True}, "hard_pin": None},
    }
    for _ in range(2):  # those of the backend that is chosen: frameworks fill in the others, too
        Settings.of({"backend": backend})
        Settings.of({"backend": {"storage_backend": "MooncakeStore", **backend}})
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition("=")[0] for text in said] == [
        "backend.SimpleStorage.total_storage_size",
        "backend.storage_backend",
        "backend.MooncakeStore.protocol",
        "backend.MooncakeStore.offload.enabled",
    ]
    assert "dataplane.capacity_bytes" in said[0]
    assert "dataplane.mooncake_protocol" in said[2]


def test_an_unknown_section_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """As is an unknown setting of `controller` and of `metrics`. The package ignores them."""
    warn_once.cache_clear()
    unknown = {"contoller": {"polling_mode": True}, "enable": True, "none": None}
    known = {"controller": {"samplr": "x", "sampler": "SequentialSampler"}, "metrics": {"prt": 1}}
    for _ in range(2):
        Settings.of({**unknown, **known})
    assert [text.partition(" is not used: ")[0] for text in caplog.messages] == [
        "contoller",
        "enable",
        "none",
        "controller.samplr",
        "metrics.prt",
    ]
    assert "unknown section; expected one of metrics, controller, backend" in caplog.text
    assert "unknown setting; expected one of controller.sampler," in caplog.text


def test_the_settings_of_an_earlier_init_are_known(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    settings = Settings.of(None)
    settings.metrics.endpoint = "there:1"
    Settings.of(settings)
    assert not caplog.messages


# --- with a service


@pytest.mark.integration
def test_metrics_are_open_where_nobody_set_a_token() -> None:
    settings = Settings.of({"metrics": {"enabled": True}, "dataplane": SMALL})
    assert settings.service().open_metrics
    assert not Settings.of({"metrics": {"enabled": True}, "dataplane": {"token": "t"}}).service().open_metrics
    assert not Settings.of({"dataplane": SMALL}).service().open_metrics
    with serve({**SMALL, "http_port": 0, "token": "secret", "open_metrics": True}) as server:
        place = f"http://{server.http_address}"
        with urlopen(f"{place}/metrics", timeout=60) as answer:
            assert b"# TYPE" in answer.read()
        for refused in (
            Request(f"{place}/api/service"),
            Request(f"{place}/metrics/"),
            Request(f"{place}/metrics", data=b"x", method="POST"),
            Request(f"{place}/metrics", method="DELETE"),
        ):
            with pytest.raises(HTTPError) as caught:
                urlopen(refused, timeout=60)
            assert caught.value.code in (401, 501)
            caught.value.close()
    with serve({**SMALL, "http_port": 0, "token": "secret"}) as server:
        with pytest.raises(HTTPError, match="401") as caught:
            urlopen(f"http://{server.http_address}/metrics", timeout=60)
        caught.value.close()


@dataclass
class Turn:
    """What no column carries."""

    text: str


@pytest.mark.integration
def test_objects_of_any_kind_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tq.init({"objects": "pickle", "dataplane": SMALL})
    rows = [Turn("one"), {"a": Turn("two")}]
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"turns": NonTensorStack(*rows)}, batch_size=2))
    tq.kv_put("c", "p", {"x": torch.ones(2)})
    tq.kv_put("d", "p", {"x": Turn("three")})
    assert list(tq.kv_batch_get(["a", "b"], "p")["turns"]) == rows
    both: Any = tq.kv_batch_get(["c", "d"], "p")["x"]
    assert list(both)[1] == Turn("three")
    tq.kv_put("e", "p", {"text": "half a pair \ud800"})
    assert list(tq.kv_batch_get("e", "p", "text")["text"]) == ["half a pair \ud800"]
    config = tq.get_client().config
    assert config.token
    with connect(config.address or "", token=config.token) as plain:
        with pytest.raises(UnsupportedValueError, match="objects='pickle'"):
            plain.get_samples(["a"], "p", ["turns"])
        with pytest.raises(UnsupportedValueError, match=r"row 0.*objects='pickle'"):
            plain.put_samples(["e"], "p", {"turns": [Turn("four")]})
    found = tq.TransferQueueClient("of the environment", config.address)
    try:
        assert found.get_partition_list() == ["p"]
    finally:
        found.close()


@pytest.mark.integration
def test_who_attaches_pickles_if_the_service_was_started_so() -> None:
    with serve({**SMALL, "token": "secret"}) as server:
        where = {"address": server.address, "token": "secret"}
        tq.init({"objects": "pickle", "dataplane": where})
        tq.kv_put("a", "p", {"turn": Turn("one")})
        tq.close()
        tq.init({"dataplane": where})
        assert list(tq.kv_batch_get("a", "p")["turn"]) == [Turn("one")]
        tq.close()


def test_a_switched_job_pickles_unless_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor where that would be refused."""
    warn_once.cache_clear()
    native, refusing = Settings.of(None), Settings.of({"objects": "refuse"})
    bare, secret = DataPlaneConfig(address="there:1"), DataPlaneConfig(address="there:1", token="secret")
    assert native.objects_with(None) == native.objects_with(secret) == "refuse"
    monkeypatch.setattr(sys, "meta_path", [Replacement("transfer_queue"), *sys.meta_path])
    assert native.objects_with(None) == native.objects_with(secret) == "pickle"
    assert refusing.objects_with(None) == native.objects_with(bare) == "refuse"
    (said,) = caplog.messages
    assert said.startswith("TQ_REPLACE is set, so objects that no column can store are pickled")
    monkeypatch.setenv("TQ_TOKEN", "secret")
    assert native.objects_with(bare) == "pickle"


@pytest.mark.integration
@pytest.mark.parametrize("token", ["", "mine"])
def test_a_session_takes_away_the_token_that_it_set_and_no_other(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("TQ_TOKEN", token)
    tq.init({"dataplane": SMALL | {"objects": "pickle"}})
    assert os.environ["TQ_TOKEN"] if not token else os.environ["TQ_TOKEN"] == token
    assert "TQ_ADDRESS" in os.environ
    tq.close()
    assert os.environ.get("TQ_TOKEN", "") == token
    assert "TQ_ADDRESS" not in os.environ


@pytest.mark.integration
def test_nothing_is_pickled_without_a_token_or_unasked() -> None:
    with serve(SMALL) as server, pytest.raises(InvalidRequestError, match="start the service with a token"):
        connect(server.address, objects="pickle").list_samples("p")
    with pytest.raises(ValueError, match="objects='yes': expected one of refuse, pickle"):
        Settings.of({"objects": "yes"}).service()
    tq.init({"dataplane": SMALL})
    with pytest.raises(TypeError, match=r"Turn.*objects='pickle'"):
        tq.kv_put("a", "p", {"turn": Turn("one")})
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2), (1, 2, 3))
    tq.kv_put("a", "p", {"image": image, "seen": {1, 2}, "order": OrderedDict([("b", 1), ("a", 2)])})
    back = tq.kv_batch_get("a", "p")
    assert back["seen"].tolist() == [{1, 2}]
    [order] = back["order"].tolist()
    assert type(order) is OrderedDict
    assert back["image"].tolist()[0].tobytes() == image.tobytes()


# --- What the metas of the adapter for TransferQueue do without a service: choosing, joining and
# looking at samples.


def batch(indexes: list[int], partition: str = "p", **extra: Any) -> BatchMeta:
    rows = [torch.zeros(index + 1) for index in indexes]
    fields: dict[str, Any] = {
        "score": torch.zeros(len(indexes)),
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
    }
    made = BatchMeta(indexes, [partition] * len(indexes), extra_info=extra)
    made.add_fields(TensorDict(fields, batch_size=len(indexes)))
    made.update_custom_meta([{"index": index} for index in indexes])
    return made


def keyed(keys: list[str], partition: str = "p", **extra: Any) -> KVBatchMeta:
    return KVBatchMeta(keys, [{"key": key} for key in keys], partition, ["ids"], extra)


def test_keys_are_chosen_ordered_and_cut() -> None:
    meta = keyed(["a", "b", "c"], seed=1)
    assert (meta.size, len(meta)) == (3, 3)
    chosen = meta.select_keys(["c", "a"])
    assert (chosen.keys, chosen.tags) == (["c", "a"], [{"key": "c"}, {"key": "a"}])
    assert (chosen.partition_id, chosen.fields, chosen.extra_info) == ("p", ["ids"], {"seed": 1})
    meta.reorder([2, 0, 1])
    assert meta.keys == [tag["key"] for tag in meta.tags] == ["c", "a", "b"]
    assert [part.keys for part in meta.chunk(2)] == [["c", "a"], ["b"]]
    assert [len(part) for part in meta.chunk(5)] == [1, 1, 1, 0, 0]
    assert str(meta) == "KVBatchMeta(size=3, field_names=['ids'], extra_info={'seed': 1})"


def test_keys_are_joined() -> None:
    joined = KVBatchMeta.concat([keyed(["a"], seed=1), KVBatchMeta(), keyed(["b"], top=torch.ones(2))])
    assert (joined.keys, joined.tags) == (["a", "b"], [{"key": "a"}, {"key": "b"}])
    assert joined.extra_info is not None
    assert joined.extra_info.keys() == {"seed", "top"}
    assert KVBatchMeta.concat([]).keys == []


def test_tags_of_keys_are_copies() -> None:
    tags: list[dict[str, Any]] = [{"turns": [1]}]
    meta = KVBatchMeta(["a"], tags)
    tags[0]["turns"].append(2)
    assert meta.tags == [{"turns": [1]}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: KVBatchMeta(["a"], []), "same length.*1 keys and 0 tags"),
        (lambda: KVBatchMeta(["a", "a"], [{}, {}]), "duplicated keys"),
        (lambda: keyed(["a"]).select_keys(["a", "a"]), "duplicate keys"),
        (lambda: keyed(["a"]).reorder([0, 0]), "2 indexes, which does not match the 1 samples"),
        (lambda: keyed(["a", "b"]).reorder([0, 0]), "duplicate indexes"),
        (lambda: KVBatchMeta.concat([keyed(["a"]), keyed(["b"], "q")]), "Partition do not match: 'p' and 'q'"),
        (lambda: KVBatchMeta.concat([keyed(["a"], seed=1), keyed(["b"], seed=2)]), "extra_info"),
        (lambda: KVBatchMeta.concat([keyed(["a"], seed=1), keyed(["b"], seed=True)]), "extra_info"),
        (lambda: batch([0, 1]).select_samples([2]), r"sample_indices must be in \[0, 2\)"),
        (lambda: batch([0, 1]).reorder([0, 0]), "2 positions from 0 on once, without duplicates"),
        (lambda: batch([0]).update_custom_meta([]), "0 mappings for 1 samples"),
        (lambda: batch([0]).union(batch([1])), "global_indexes do not match"),
        (lambda: BatchMeta.concat([batch([0]), batch([1]).select_fields(["score"])]), "fields"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


def test_a_key_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"\['b'\] not found in current batch"):
        keyed(["a"]).select_keys(["b"])


def test_samples_are_chosen_with_all_that_belongs_to_them() -> None:
    meta = batch([3, 1, 2])
    chosen = meta.select_samples([2, 0])
    assert chosen.global_indexes == [2, 3]
    assert chosen.custom_meta == [{"index": 2}, {"index": 3}]
    assert [tuple(shape) for shape in chosen.get_shapes("ids")] == [(3,), (4,)]
    assert (meta[1].global_indexes, meta[-1].global_indexes, meta[1:].global_indexes) == ([1], [2], [1, 2])
    assert [part.global_indexes for part in meta.chunk(2)] == [[3, 1], [2]]
    meta.reorder([1, 2, 0])
    assert meta.global_indexes == [tags["index"] for tags in meta.custom_meta] == [1, 2, 3]
    with pytest.raises(IndexError):
        meta[3]
    with pytest.raises(TypeError):
        meta["ids"]  # type: ignore[index]


def test_fields_are_chosen() -> None:
    meta = batch([0, 1]).select_fields(["score", "unknown"])
    assert meta.field_names == ["score"]
    assert meta.get_dtypes("score") == [torch.float32] * 2
    with pytest.raises(KeyError, match="has no field 'ids'"):
        meta.get_dtypes("ids")


@pytest.mark.parametrize("meta", [batch([3, 1, 2]), keyed(["a", "b", "c"])], ids=["batch", "keys"])
def test_a_number_of_parts_below_one(meta: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The errors and the result are the package's."""
    warn_once.cache_clear()
    with pytest.raises(ZeroDivisionError, match="chunks=0: expected an integer of 1 or more"):
        meta.chunk(0)
    with pytest.raises(TypeError):
        meta.chunk(1.5)
    assert [meta.chunk(-1), meta.chunk(-2), meta.chunk(-1)] == [[], [], []]
    assert [text.partition(":")[0] for text in caplog.messages] == ["chunks=-1", "chunks=-2"]


def test_keys_are_repeated_by_negative_indexes() -> None:
    meta = keyed(["a", "b", "c"])
    meta.reorder([2, -1, 0])
    assert meta.keys == [tag["key"] for tag in meta.tags] == ["c", "c", "a"]


def test_nothing_is_joined_to_nothing() -> None:
    for kind in (BatchMeta, KVBatchMeta):
        assert len(kind.concat(None)) == 0  # type: ignore[arg-type]


def test_samples_are_joined() -> None:
    joined = BatchMeta.concat([batch([0]), BatchMeta.empty(), batch([4], "q")])
    assert (joined.global_indexes, joined.partition_ids) == ([0, 4], ["p", "q"])
    assert [tuple(shape) for shape in joined.get_shapes("ids")] == [(1,), (5,)]
    assert [part.partition_ids for part in joined.chunk_by_partition()] == [["p"], ["q"]]
    assert len(BatchMeta.concat([])) == 0


def test_fields_of_the_same_samples_are_united() -> None:
    one, other = batch([0, 1], seed=1).select_fields(["ids"]), batch([0, 1], top=2).select_fields(["score"])
    both = one.union(other)
    assert both.field_names == ["ids", "score"]
    assert both.extra_info == {"seed": 1, "top": 2}
    assert one.field_names == ["ids"]
    assert one.union(BatchMeta.empty()).field_names == ["ids"]


def test_what_is_said_beside_the_samples() -> None:
    meta = batch([0], seed=1)
    meta.set_extra_info("top", 2)
    meta.update_extra_info({"end": 3})
    assert (meta.has_extra_info("seed"), meta.get_extra_info("none", 5), meta.remove_extra_info("seed")) == (True, 5, 1)
    copied = meta.get_all_extra_info()
    meta.clear_extra_info()
    assert (copied, meta.extra_info) == ({"top": 2, "end": 3}, {})
    tags = meta.get_all_custom_meta()
    meta.clear_custom_meta()
    assert (tags, meta.custom_meta) == ([{"index": 0}], [{}])


def test_one_sample_is_looked_at() -> None:
    sample = batch([2, 5]).samples[1]
    assert (sample.global_index, sample.partition_id, sample.production_status) == (5, "p", 1)
    assert sample.custom_meta == {"index": 5}
    assert tuple(sample.fields["ids"]["shape"]) == (6,)
    assert repr(sample) == "sample 5 of 'p', fields ['ids', 'score']"


def test_a_meta_is_pickled() -> None:
    meta = pickle.loads(pickle.dumps(batch([1, 2], seed=1)))
    assert (meta.global_indexes, meta.extra_info, meta.is_ready) == ([1, 2], {"seed": 1}, True)
    meta.production_status[0] = 0
    assert not meta.is_ready
    assert repr(meta).startswith("BatchMeta(size=2, field_names=['ids', 'score'], is_ready=False")


# --- Rows of one field that differ in dtype, kind or dimensions: they are in two columns, and count
# as one field.


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPlaneClient]:
    """A client of the service that `tq` uses."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"controller": {"polling_mode": True}, "dataplane": {"capacity_bytes": 32 << 20, "http_port": 0}})
    with connect(tq.get_client().config.address or "") as client:
        yield client
    tq.close()


def rows_of(key: str, partition: str = "p") -> torch.Tensor:
    [row] = tq.kv_batch_get(key, partition, "x")["x"].unbind()
    return row


@pytest.mark.integration
def test_a_row_is_of_the_dtype_it_was_put_with(native: DataPlaneClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.tensor([1, 2], dtype=torch.int64)})
    tq.kv_put("c", "p", {"x": torch.ones(1, dtype=torch.bfloat16)})
    assert [rows_of(key).dtype for key in "abc"] == [torch.float32, torch.int64, torch.bfloat16]
    tq.kv_put("b", "p", {"x": torch.zeros(3)})
    together = tq.kv_batch_get(["b", "a"], "p", "x")["x"]
    assert together.dtype == torch.float32
    assert [row.tolist() for row in together.unbind()] == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.integration
@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_fit_a_field_that_a_native_client_declared_go_there(native: DataPlaneClient, count: int) -> None:
    dense = FieldSpec("dense", "float32", (3,))  # type: ignore[arg-type]
    native.register_partition("p", {"x": dense}, None, [])
    keys = ["a", "b"][:count]
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.ones(count, 3)}, batch_size=count))
    assert native.get_samples(keys, "p", ["x"])["x"].tolist() == [[1, 1, 1]] * count
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.ones(count, 4)}, batch_size=count))
    assert [rows_of(key).tolist() for key in keys] == [[1, 1, 1, 1]] * count


@pytest.mark.integration
def test_two_columns_count_as_one_field(native: DataPlaneClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3), "y": torch.ones(2)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.ones(2, 2, dtype=torch.int64)})
    assert native.list_samples("p").fields == ["x", "y"]
    [found] = [each for each in native.stats().partitions if each.partition == "p"]
    assert found.produced == {"x": 2, "y": 2}
    assert native.matrix("p").produced.keys() == {"x", "y"}
    shown: c.Shown = native.show_sample("b", "p")
    assert {cell.field for cell in shown.cells} == {"x", "y"}
    assert shown.missing == ()
    with pytest.raises(FieldNotProducedError, match="'x'"):
        native.get_samples(["b"], "p", ["x"])
    assert tq.get_client().get_meta(["x"], 2, "p", task_name="t").size == 2


@pytest.mark.integration
def test_what_takes_the_place_of_a_row_frees_its_memory(native: DataPlaneClient) -> None:
    def live_bytes() -> int:
        return next(each.live_bytes for each in native.stats().partitions if each.partition == "p")

    tq.kv_put("a", "p", {"x": torch.ones(1000)})
    tq.kv_put("b", "p", {"x": torch.ones(100_000)})
    before = live_bytes()
    tq.kv_put("b", "p", {"x": torch.tensor(1)})
    assert live_bytes() < before - 300_000
    tq.kv_put("b", "p", {"x": torch.ones(500, 500)})
    assert live_bytes() > before
    tq.kv_put("b", "p", {"x": torch.ones(1)})
    assert live_bytes() < before - 300_000
    tq.kv_clear(["a", "b"], "p")
    assert live_bytes() == 0


@pytest.mark.integration
def test_a_field_is_of_one_column_again_when_the_rows_before_are_gone(native: DataPlaneClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(3)})
    tq.kv_put("b", "p", {"x": torch.ones(2, 2)})
    tq.kv_clear("a", "p")
    tq.kv_batch_put(["b", "c"], "p", TensorDict({"x": torch.zeros(2, 2, 2)}, batch_size=2))
    assert [tuple(row.shape) for row in native.get_samples(["b", "c"], "p", ["x"])["x"]] == [(2, 2), (2, 2)]
    located: c.Located = native.perform(
        ask, c.Locate(partition="p", samples=c.Samples(ids=("b", "c")), fields=("x",), missing_ok=True)
    )
    assert [found.name for found in located.fields] == ["x"]


@pytest.mark.integration
def test_a_checkpoint_has_both_columns(native: DataPlaneClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.tensor([[5]])})
    tq.save_checkpoint(tmp_path / "c")
    tq.kv_clear(["a", "b"], "p")
    tq.load_checkpoint(tmp_path / "c")
    assert [rows_of(key).tolist() for key in "ab"] == [[1, 1, 1], [[5]]]
    tq.kv_put("b", "p", {"x": torch.zeros(1)})
    assert rows_of("b").tolist() == [0]


@pytest.mark.integration
def test_a_strict_schema_has_no_other_column(native: DataPlaneClient) -> None:
    native.register_partition("s", ["x"], None, [], strict=True)
    tq.kv_put("a", "s", {"x": torch.ones(2)})
    for fields in ({"x": torch.ones(2).bool()}, {"y": torch.ones(2)}):
        with pytest.raises(SchemaError, match="strict"):
            tq.kv_put("a", "s", fields)


@pytest.mark.integration
def test_the_meta_of_such_rows_says_what_is_known(native: DataPlaneClient) -> None:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.ones(2, 2)})
    meta = client.kv_retrieve_meta(["a", "b"], "p")
    assert meta.is_ready
    assert meta.field_schema["x"]["is_nested"] is True
    assert meta.get_shapes("x") == [(3,), None]
    assert client.kv_retrieve_meta("b", "p").field_names == ["x"]
    assert VARIANTS not in str(meta)


# --- Puts by key: what they give back, and what they ask the service for.


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    """Of a service of its own."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"dataplane": {"capacity_bytes": 32 << 20}})
    yield tq.get_client()
    tq.close()


def values(count: int) -> TensorDict:
    return TensorDict({"v": torch.arange(count)}, batch_size=count)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the commands that clients send from now on."""
    names: list[str] = []
    begin = Calls.begin

    def seen(self: Calls, command: Any, timeout_s: float | None = None) -> Any:
        names.append(type(command).__name__)
        return begin(self, command, timeout_s)

    monkeypatch.setattr(Calls, "begin", seen)
    return names


@pytest.mark.integration
def test_the_answer_to_a_put_says_what_the_samples_have(client: tq.TransferQueueClient, sent: list[str]) -> None:
    made = tq.kv_put("a", "p", {"v": torch.tensor(1), "w": torch.arange(3)}, {"n": 1})
    assert (made.keys, made.tags, made.fields, made.partition_id) == (["a"], [{"n": 1}], ["v", "w"], "p")
    tags = tq.kv_put("b", "p", tag={"n": 2})
    assert (tags.tags, tags.fields) == ([{"n": 2}], [])
    assert tq.kv_batch_put(["c", "d"], "p", values(2)).tags == [{}, {}]
    again = tq.kv_put("a", "p", {"x": torch.tensor(1)}, {"m": None})
    assert (again.tags, again.fields) == ([{"n": 1, "m": None}], ["v", "w", "x"])
    some = tq.kv_batch_put(["a", "e"], "p", values(2), [{}, {"n": 5}])
    assert (some.tags, some.fields) == ([{"n": 1, "m": None}, {"n": 5}], ["v"])
    assert "List" not in sent


@pytest.mark.integration
def test_tags_come_back_as_the_service_has_them_and_are_the_callers_own(client: tq.TransferQueueClient) -> None:
    items = [1]
    tag = {"real": np.float64(0.5), "count": torch.tensor(3), "flag": np.bool_(True), "none": None, "items": items}
    made = tq.kv_batch_put(["a", "b"], "p", tags=[tag, {"text": "x"}])
    assert made.tags == list(tq.kv_list("p")["p"].values())
    assert [type(value) for value in made.tags[0].values()] == [float, int, bool, type(None), list]
    assert made.tags[1] == {"text": "x"}
    made.tags[0]["items"].append(2)
    made.tags[0]["new"] = 1
    assert items == [1]
    assert "new" not in tag


@pytest.mark.integration
def test_a_text_of_a_native_client_that_looks_like_a_value_is_that_text(client: tq.TransferQueueClient) -> None:
    texts = [f"{ENCODED}{rest}" for rest in ("zzz", "", "kgE=", "\u00e4", "wQ==")]
    with connect(client.config.address or "") as native:
        native.register_partition("p", ["x"], None, [])
        native.put_samples(list("abcde"), "p", {"x": torch.ones(5)}, tags=[{"v": text} for text in texts])
    assert [tag["v"] for tag in tq.kv_list("p")["p"].values()] == texts
    assert [tag["v"] for tag in client.get_meta(["x"], 5, "p", task_name="t").custom_meta] == texts
    tq.kv_put("f", "p", tag={"v": texts[0]})
    assert tq.kv_list("p")["p"]["f"] == {"v": texts[0]}


@pytest.mark.integration
def test_a_tag_that_is_refused_says_what_tags_are(client: tq.TransferQueueClient) -> None:
    with pytest.raises(UnsupportedValueError, match=r"tag v, row 1: .*complex.*Tags are scalars, and lists and dicts"):
        tq.kv_batch_put(["a", "b"], "p", tags=[{}, {"v": 1j}])


@pytest.mark.integration
def test_a_partition_that_is_no_text_is_named(client: tq.TransferQueueClient) -> None:
    with pytest.raises(TypeError, match="argument partition_id: int 3 is not supported here"):
        tq.kv_put("a", 3, {"x": torch.tensor(1)})  # type: ignore[arg-type]


@pytest.mark.integration
def test_one_row_of_any_kind_is_a_row_like_others(client: tq.TransferQueueClient) -> None:
    first = {"ids": torch.arange(3), "wide": torch.ones(2, 2), "reward": torch.tensor(0.5), "text": "x"}
    tq.kv_put("a", "p", first)
    tq.kv_batch_put(["b"], "p", TensorDict({"ids": torch.arange(5).reshape(1, 5)}, batch_size=1))
    tq.kv_batch_put(["c", "d"], "p", TensorDict({"ids": torch.zeros(2, 4, dtype=torch.int64)}, batch_size=2))
    tq.kv_put("e", "p", {"ids": torch.zeros(0, dtype=torch.int64)})
    rows = tq.kv_batch_get(["a", "b", "c", "e"], "p", ["ids"])["ids"]
    assert rows.layout == torch.jagged
    assert [row.tolist() for row in rows.unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4], [0] * 4, []]
    whole = tq.kv_batch_get("a", "p")
    assert sorted(whole.keys()) == sorted(first)
    assert whole["wide"].unbind()[0].tolist() == [[1, 1], [1, 1]]
    assert whole["reward"].tolist() == [0.5]
    assert whole.get("text").tolist() == ["x"]


@pytest.mark.integration
def test_samples_without_keys_are_not_among_the_keys(client: tq.TransferQueueClient) -> None:
    client.put(values(2), partition_id="p")
    assert tq.kv_list("p") == {"p": {}}
    tq.kv_put("_unnamed", "p", tag={"n": 1})
    tq.kv_put("a", "q", tag={"n": 2})
    assert tq.kv_list() == {"p": {"_unnamed": {"n": 1}}, "q": {"a": {"n": 2}}}


# --- Unusual arguments of calls of the low-level client and of reads by key: the results are those of
# the package, as `scripts/arguments.py` shows.


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    """Of a service of its own, which answers at once."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"controller": {"polling_mode": True}, "dataplane": {"capacity_bytes": 32 << 20}})
    yield tq.get_client()
    tq.close()


@pytest.mark.integration
def test_get_meta_does_not_make_a_partition(adapted: tq.TransferQueueClient) -> None:
    for count in (0, 2):
        assert adapted.get_meta(["v"], count, "p", task_name="t").size == 0
    with pytest.raises(RuntimeError, match="partition 'p'"):
        adapted.get_meta(["v"], 2, "p", mode="force_fetch")
    assert adapted.get_consumption_status("t", "p") == (None, None)
    assert tq.kv_list() == {}
    assert adapted.get_partition_list() == []


@pytest.mark.integration
@pytest.mark.parametrize("sampler", [tq.GRPOGroupNSampler(2), tq.SeqlenBalancedSampler(1, 2)])
def test_no_sampler_makes_a_partition(monkeypatch: pytest.MonkeyPatch, sampler: Any) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    settings = {"sampler": sampler, "polling_mode": True}
    tq.init({"controller": settings, "dataplane": {"capacity_bytes": 32 << 20}})
    try:
        adapted = tq.get_client()
        rank = {"dp_rank": 0}
        assert adapted.get_meta(["v"], 2, "p", task_name="t", sampling_config=rank).size == 0
        assert adapted.get_partition_list() == []
    finally:
        tq.close()


@pytest.mark.integration
@pytest.mark.parametrize("count", [0, -1])
def test_an_insert_of_nothing_makes_a_partition(adapted: tq.TransferQueueClient, count: int) -> None:
    made = adapted.get_meta(["v"], count, "p", mode="insert")
    assert (made.size, made.field_names, made.is_ready) == (0, ["v"], False)
    assert adapted.get_partition_list() == ["p"]
    with pytest.raises(ValueError, match="no rows"):
        adapted.put(TensorDict({}, batch_size=0), partition_id="p")


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["insert", "fetch"])
def test_get_meta_without_fields_or_samples(adapted: tq.TransferQueueClient, mode: str) -> None:
    with pytest.raises(RuntimeError, match="data_fields is None"):
        adapted.get_meta(None, 2, "p", mode=mode, task_name="t")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="batch_size=None: expected an int"):
        adapted.get_meta(["v"], None, "p", mode=mode, task_name="t")  # type: ignore[arg-type]


@pytest.mark.integration
def test_a_production_status_has_the_order_of_the_partition(
    adapted: tq.TransferQueueClient,
) -> None:
    whole: dict[str, Any] = {"z": torch.tensor(1), "t": "text", "a": torch.zeros(2, 2)}
    whole |= {"o": np.zeros(2), "m": torch.zeros(3)}
    tq.kv_put("all", "p", whole)
    for name, value in whole.items():
        tq.kv_put(name, "p", {name: value})
    last = {"b": NonTensorStack(1), "a": torch.ones(1, 1, 2)}
    tq.kv_batch_put(["b"], "p", TensorDict(last, batch_size=1))

    def columns(*names: str) -> list[list[int]]:
        """Per column: of "all" and of the keys that have one field."""
        _, status = adapted.get_production_status(list(names), "p")
        assert status is not None
        return status.T.tolist()

    lone = {name: [1, *(int(name == other) for other in whole), 0] for name in whole}
    lone["a"][-1] = 1
    assert columns(*whole) == columns(*reversed(whole)) == list(lone.values())
    assert columns("m", "z", "m") == [lone["z"], lone["m"]]
    assert columns("b", "b") == [[0] * 6 + [1]]


@pytest.mark.integration
def test_a_partition_keeps_fields_whose_values_were_all_cleared(
    client: tq.TransferQueueClient,
) -> None:
    tq.kv_put("a", "p", {"v": torch.tensor(1), "w": torch.zeros(2, 2), "o": "text"})
    tq.kv_put("b", "p", {"v": torch.tensor(1)})

    def columns() -> list[list[int]]:
        _, status = client.get_production_status(["o", "w", "v"], "p")
        assert status is not None
        return status.T.tolist()

    tq.kv_clear("a", "p")
    assert columns() == [[1], [0], [0]]
    assert not client.check_production_status(["w"], "p")
    tq.kv_clear("b", "p")
    assert columns() == [[], [], []]
    assert client.check_production_status(["w"], "p")
    tq.kv_put("c", "p", {"w": torch.zeros(3, 1)})
    assert columns() == [[0], [1], [0]]


@pytest.mark.integration
def test_fields_are_declared_once(client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = []
    extend = operations.extend_partition

    def spy(session_state: Any, partition: str, **options: Any) -> Any:
        declared.append(sorted(options.get("fields") or {}))
        return extend(session_state, partition, **options)

    monkeypatch.setattr(operations, "extend_partition", spy)
    for number in range(3):
        tq.kv_put(f"k{number}", "p", {"v": torch.tensor(1), "w": torch.zeros(2, 2)}, {"n": 1})
        tq.kv_put(f"k{number}", "p", {"x": "text"})
        tq.kv_put(f"k{number}", "p", tag={"n": 2})
    assert declared == [["v", "w"], ["x"]]


@pytest.mark.integration
def test_sizes_of_batches(client: tq.TransferQueueClient) -> None:
    client.put(TensorDict({"v": torch.arange(3)}, batch_size=3), partition_id="p")
    assert client.get_meta(["v"], True, "p", task_name="t").size == 1
    assert client.get_meta(["v"], np.int64(1), "p", task_name="t").size == 1  # type: ignore[arg-type]
    assert client.get_meta(["v"], False, "p", mode="insert").size == 0
    for size in (1.0, -1, "1"):
        with pytest.raises(RuntimeError, match=f"batch_size={size!r}: expected"):
            client.get_meta(["v"], size, "p", task_name="t")  # type: ignore[arg-type]
        if size != -1:
            with pytest.raises(RuntimeError, match=f"batch_size={size!r}: expected"):
                client.get_meta(["v"], size, "q", mode="insert")  # type: ignore[arg-type]
        assert client.get_meta(["v"], size, "p", mode="force_fetch").size == 3  # type: ignore[arg-type]
    assert client.get_partition_list() == ["p"]


@pytest.mark.integration
def test_repeated_keys_are_created_once(client: tq.TransferQueueClient) -> None:
    meta = client.kv_retrieve_meta(["x", "y", "x"], "p", create=True)
    assert meta.size == 3
    assert client.kv_retrieve_keys(meta.global_indexes, "p") == ["x", "y", "x"]
    assert tq.kv_list("p") == {"p": {"x": {}, "y": {}}}


@pytest.mark.integration
def test_a_read_has_its_fields_in_the_order_of_their_names(
    adapted: tq.TransferQueueClient,
) -> None:
    tq.kv_put("k", "p", {"z": torch.tensor(1), "a": torch.zeros(2, 2), "m": "text"})
    names: list[Any] = [None, ["z", "m", "a", "z"]]
    for fields in names:
        assert list(tq.kv_batch_get("k", "p", fields).keys()) == ["a", "m", "z"]


@pytest.mark.integration
def test_a_read_of_missing_keys_says_what_the_package_says(
    adapted: tq.TransferQueueClient,
) -> None:
    tq.kv_batch_put(["late"], "p", tags=[{}])
    for partition in ("p", "nowhere"):
        for fields in (None, ["v"]):
            text = f"keys or partition were not found: .*{partition!r}.*'x', 'y'"
            with pytest.raises(ValueError, match=text):
                tq.kv_batch_get(["x", "y"], partition, fields)
    text = "Some fields are not ready in all the requested keys: 'late'"
    with pytest.raises(ValueError, match=text):
        tq.kv_batch_get("late", "p", ["v"])


@pytest.mark.integration
@pytest.mark.parametrize("values", [["a", "b"], ("a", "b")])
def test_a_list_of_non_tensors_is_rows(adapted: tq.TransferQueueClient, values: Any) -> None:
    """NeMo-RL's adapter refuses it, TransferQueue stores it."""
    tq.kv_batch_put(["k", "l"], "p", TensorDict({"x": NonTensorData(values)}, batch_size=2))
    assert tq.kv_batch_get(["l", "k"], "p").get("x").tolist() == ["b", "a"]


# --- What the adapter declares of fields holds for partitions that others made anew.


@pytest.mark.integration
def test_a_field_that_went_with_its_partition_is_declared_again() -> None:
    with serve({"capacity_bytes": 8 << 20}) as server, connect(server.address) as one, connect(server.address) as two:
        for turn in range(2):
            two.clear_samples(None, "p")
            two.register_partition("p", [], None, [])
            for name, shapes in (("a", [(2, 3)]), ("b", [(2, 3)]), ("c", [(4, 5)])):
                images = {"image": [torch.full(shape, float(turn)) for shape in shapes]}
                one.perform(operations.put, [name], "p", images)
        rows = two.get_samples(["a", "c"], "p", ["image"])["image"]
        assert [tuple(row.shape) for row in rows] == [(2, 3), (4, 5)]


@pytest.mark.integration
def test_data_without_a_dimension_of_rows_is_refused_before_it_is_stored(client: tq.TransferQueueClient) -> None:
    meta = client.put(TensorDict({"x": torch.arange(2.0)}, batch_size=2), partition_id="p")
    assert meta is not None
    bare = TensorDict({"y": torch.zeros(2, 2)}, batch_size=[])
    for call in (
        lambda: client.put(bare, metadata=meta),
        lambda: client.put(bare, partition_id="p"),
        lambda: tq.kv_batch_put(["a", "b"], "p", bare),
    ):
        with pytest.raises(ValueError, match=r"batch_size=\[\]: its first dimension must be the number of rows"):
            call()
    assert not client.check_production_status(["y"], "p")
