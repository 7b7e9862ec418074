"""A script that uses NeMo-RL's `DataPlaneClient` sees the same of `dataplane.compat.nemo_rl` and of the TransferQueue
package through what NeMo-RL's adapter does with it.

NeMo-RL is not on PyPI (its name there is a placeholder of version 0.0.0), so that the adapter that is compared with is
`nemo_reference`, which makes the same calls of the real package.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.compat.nemo_rl import DataPlaneClient, KVBatchMeta, build_data_plane_client
from dataplane.compat.nemo_rl.adapter import TQDataPlaneClient
from dataplane.compat.transfer_queue.settings import warn_once

METHODS = {
    "register_partition": (
        "partition_id",
        "fields",
        "num_samples",
        "consumer_tasks",
        "grpo_group_size",
        "enums",
    ),
    "claim_meta": (
        "partition_id",
        "task_name",
        "required_fields",
        "batch_size",
        "dp_rank",
        "blocking",
        "timeout_s",
    ),
    "get_data": ("meta", "select_fields"),
    "check_consumption_status": ("partition_id", "task_names"),
    "put_samples": ("sample_ids", "partition_id", "fields", "tags"),
    "get_samples": ("sample_ids", "partition_id", "select_fields"),
    "clear_samples": ("sample_ids", "partition_id"),
    "save_checkpoint": ("checkpoint_dir", "metadata"),
    "load_checkpoint": ("checkpoint_dir",),
    "close": (),
}
"""NeMo-RL's abstract class."""


def test_the_methods_are_those_of_nemo_rl() -> None:
    found = {
        name: tuple(inspect.signature(method).parameters)[1:]
        for name, method in inspect.getmembers(DataPlaneClient, inspect.isfunction)
        if not name.startswith("_")
    }
    assert found == METHODS


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_sees_the_same_of_both(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    original, ours = (side["nemo"] for side in both)
    assert "failed" not in original, original["failed"]
    assert "failed" not in ours, ours["failed"]
    assert ours == original


def test_configurations_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    cfg = {"enabled": True, "impl": "rl_dataplane", "backend": "simple"}
    with pytest.raises(ValueError, match="does not enable the data plane; set enabled=True"):
        build_data_plane_client({**cfg, "enabled": False})
    with pytest.raises(ValueError, match="impl='other'"):
        build_data_plane_client({**cfg, "impl": "other"})
    with pytest.raises(ValueError, match="backend='disk'"):
        build_data_plane_client({**cfg, "backend": "disk"})
    with pytest.raises(ValueError, match=r"controller\.name='a b'"):
        build_data_plane_client({**cfg, "controller_name": "a b"})
    with pytest.raises(RuntimeError, match="no service was found"):
        build_data_plane_client(cfg, bootstrap=False)


CFG = {"enabled": True, "impl": "transfer_queue", "dataplane": {"capacity_bytes": 32 << 20}}

INTERFACES = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass
class KVBatchMeta:
    partition_id: str
    task_name: str | None
    sample_ids: list
    fields: list | None = None
    sequence_lengths: list | None = None
    extra_info: Any = None
    tags: list | None = None


class DataPlaneClient(ABC):
    @abstractmethod
    def close(self): ...
"""
"""Of a stand-in for NeMo-RL: the names that the adapter looks for."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPlaneClient]:
    """A client that started its service."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    client = build_data_plane_client(CFG, bootstrap=True)
    yield client
    client.close()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, interfaces: str) -> None:
    """A package `nemo_rl` that can be imported until the test ends."""
    place = folder / "nemo_rl" / "data_plane"
    place.mkdir(parents=True)
    (folder / "nemo_rl" / "__init__.py").touch()
    (place / "__init__.py").touch()
    (place / "interfaces.py").write_text(interfaces)
    monkeypatch.syspath_prepend(folder)
    for name in ("nemo_rl", "nemo_rl.data_plane", "nemo_rl.data_plane.interfaces"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)  # so that it is removed at the end
        del sys.modules[name]


@pytest.mark.integration
def test_a_claim_of_a_task_that_was_not_registered_is_a_key_error_at_once(driver: DataPlaneClient) -> None:
    worker = build_data_plane_client(CFG, bootstrap=False)
    driver.register_partition("train", [], 2, ["policy", "value"])
    driver.put_samples(["a", "b"], "train", tags=[{"n": 1}, {"n": 2}])
    for client in (driver, worker):
        with pytest.raises(KeyError, match=r"'polcy' in partition 'train'; .* are 'policy', 'value'"):
            client.claim_meta("train", "polcy", [], 1)
    assert worker.claim_meta("train", "policy", [], 2).sample_ids == ["a", "b"]
    driver.register_partition("train", [], 2, ["polcy"])
    assert worker.claim_meta("train", "polcy", [], 2).sample_ids == ["a", "b"]
    worker.close()


@pytest.mark.integration
def test_without_registered_tasks_the_first_claim_makes_the_task(driver: DataPlaneClient) -> None:
    driver.register_partition("train", ["x"], 1, [])
    driver.register_partition("other", [], 1, ["policy"])
    driver.put_samples(["a"], "train", tags=[{"n": 1}])
    driver.put_samples(["a"], "free", tags=[{"n": 1}])
    for partition in ("train", "free"):
        for task in ("one", "two"):
            assert driver.claim_meta(partition, task, [], 1).sample_ids == ["a"]


@pytest.mark.integration
def test_registered_tasks_survive_a_clear_and_a_checkpoint(driver: DataPlaneClient, tmp_path: Path) -> None:
    driver.register_partition("train", [], 1, ["policy"])
    driver.put_samples(["a"], "train", tags=[{"n": 1}])
    driver.save_checkpoint(tmp_path / "saved")
    driver.clear_samples(None, "train")
    driver.put_samples(["b"], "train", tags=[{"n": 2}])
    with pytest.raises(KeyError, match="'polcy'"):
        driver.claim_meta("train", "polcy", [], 1)
    driver.load_checkpoint(tmp_path / "saved")
    with pytest.raises(KeyError, match="'polcy'"):
        driver.claim_meta("train", "polcy", [], 1)
    assert driver.claim_meta("train", "policy", [], 1).sample_ids == ["a"]


@pytest.mark.integration
def test_metas_are_of_the_class_of_nemo_rl_where_it_is_installed(
    driver: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver.meta_type is KVBatchMeta
    install(tmp_path, monkeypatch, INTERFACES)
    worker = TQDataPlaneClient(CFG, bootstrap=False)
    theirs = sys.modules["nemo_rl.data_plane.interfaces"]
    put = worker.put_samples(["a"], "train", tags=[{"n": 1}])
    claimed = worker.claim_meta("train", "policy", [], 1)
    assert type(put) is type(claimed) is theirs.KVBatchMeta
    assert isinstance(worker, theirs.DataPlaneClient)
    assert claimed.sample_ids == ["a"]
    worker.close()


@pytest.mark.integration
def test_a_nemo_rl_that_cannot_be_imported_is_logged(
    driver: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, "raise RuntimeError('no megatron here')")
    with caplog.at_level(logging.WARNING):
        worker = build_data_plane_client(CFG, bootstrap=False)
    assert worker.meta_type is KVBatchMeta
    assert "no megatron here" in caplog.text
    worker.close()


SIMPLE = {"storage_capacity": 123_457, "num_storage_units": 2}
MOONCAKE = {
    "global_segment_size": 1 << 36,
    "local_buffer_size": 1 << 32,
    "reuse_registered_buffers": False,
    "staging_buffer_size": 1 << 28,
}


class Model:
    """Stands for a model of pydantic."""

    def __init__(self, **given: Any) -> None:
        self._given = given

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]:
        return self._given if exclude_unset else {**MOONCAKE, **self._given}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({**SIMPLE, "claim_meta_poll_interval_s": 0.5}, [*SIMPLE, "claim_meta_poll_interval_s"]),
        ({"simple": SIMPLE, "mooncake_cpu": MOONCAKE}, [f"simple.{name}" for name in SIMPLE]),
        (
            {"backend": "mooncake_cpu", "simple": SIMPLE, "mooncake_cpu": MOONCAKE},
            ["backend", *(f"mooncake_cpu.{name}" for name in MOONCAKE)],
        ),
        (
            {"backend": "mooncake_cpu", "mooncake_cpu": Model(local_buffer_size=1)},
            ["backend", "mooncake_cpu.local_buffer_size"],
        ),
        ({"backend": "simple", "simple": None, "mooncake_cpu": {}}, []),
    ],
    ids=["no block", "simple", "mooncake", "model", "empty"],
)
def test_each_setting_that_has_no_effect_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    named: list[str],
) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    warn_once.cache_clear()
    for _ in range(2):
        with closing(build_data_plane_client({**CFG, **settings})):
            build_data_plane_client({**CFG, **settings}, bootstrap=False).close()
    found = [text.partition("=")[0] for text in caplog.messages if "is not used" in text]
    assert sorted(found) == sorted(named)
    assert "storage_capacity" not in found or "dataplane.capacity_bytes" in caplog.text


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_an_unknown_setting_of_a_block_is_refused(backend: str, bootstrap: bool) -> None:
    """NeMo-RL ignores it. The block of the other backend is checked, too."""
    blocks = {"simple": SIMPLE, "mooncake_cpu": {**MOONCAKE, "local_bufer_size": 1}}
    text = r"mooncake_cpu\.local_bufer_size; the block mooncake_cpu has global_segment_size, local_"
    with pytest.raises(ValueError, match=text):
        build_data_plane_client({**CFG, **blocks, "backend": backend}, bootstrap=bootstrap)
    with pytest.raises(TypeError, match="simple=5: expected a mapping of settings"):
        build_data_plane_client({**CFG, "simple": 5}, bootstrap=bootstrap)


def test_a_name_that_the_adapter_does_not_have_says_so() -> None:
    with pytest.raises(ImportError, match="_promote_1d_leaves"):
        from dataplane.compat.nemo_rl.adapter import _promote_1d_leaves  # noqa: F401, PLC0415


@pytest.mark.integration
def test_a_worker_attaches_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    cfg = {"enabled": True, "impl": "transfer_queue", "dataplane": {"capacity_bytes": 32 << 20}}
    driver = build_data_plane_client(cfg, bootstrap=True)
    try:
        address = os.environ.pop("TQ_ADDRESS")
        named = {"enabled": True, "impl": "rl_dataplane", "controller_address": address, "ack_timeout_ms": 60_000}
        worker = build_data_plane_client(named, bootstrap=False)
        driver.put_samples(["a"], "p", tags=[{"n": 1}])
        worker.meta_type = KVBatchMeta
        assert worker.claim_meta("p", "t", [], 1).tags == [{"n": 1}]
        worker.close()
    finally:
        driver.close()


@pytest.mark.integration
@pytest.mark.parametrize("value", [["a", "b"], ("a", "b"), "text", {"a": 1}, None])
def test_a_bare_non_tensor_is_refused(driver: DataPlaneClient, value: Any) -> None:
    """As NeMo-RL's contract demands. The adapter for TransferQueue stores the first two as rows."""
    fields = TensorDict({"x": torch.ones(2), "bad": NonTensorData(value)}, batch_size=[2])
    with pytest.raises(TypeError, match=r"'bad': .*non-tensor"):
        driver.put_samples(["a", "b"], "train", fields)
    with pytest.warns(RuntimeWarning, match="found nothing"):
        driver.clear_samples(None, "train")


@pytest.mark.integration
@pytest.mark.parametrize("count", [1, 2])
def test_objects_are_rows_of_a_stack_or_of_an_array(driver: DataPlaneClient, count: int) -> None:
    rows: list[Any] = [{"turn": 1}, "text"][:count]
    array = np.empty(count, dtype=object)
    array[:] = rows
    ids = ["a", "b"][:count]
    fields = TensorDict({"stack": NonTensorStack(*rows), "array": array}, batch_size=[count])
    driver.put_samples(ids, "train", fields)
    read = driver.get_samples(ids, "train", ["stack", "array"])
    assert read.get("stack").tolist() == read.get("array").tolist() == rows


def test_metas() -> None:
    meta = KVBatchMeta("p", "t", ["a", "b", "c"], ["x"], [1, 2, 3], {"k": 1}, [{"n": 0}, {}, {}])
    assert meta.subset([2, 0]) == KVBatchMeta("p", "t", ["c", "a"], ["x"], [3, 1], {"k": 1}, [{}, {"n": 0}])
    assert meta.slice(1, 9).sample_ids == ["b", "c"]
    assert meta.drop([0, 1]) == meta.subset([2])
    assert meta.drop([0, 1, 2]) is None
    assert meta.with_fields(["y", "x"]).fields == ["x", "y"]
    joined = meta.concat(KVBatchMeta("p", None, ["d"]))
    assert (joined.sample_ids, joined.sequence_lengths, joined.tags) == (["a", "b", "c", "d"], None, None)
    assert meta.concat(meta.slice(0, 1)).sequence_lengths == [1, 2, 3, 1]
    meta.stamp_tags({"m": [7, 8, 9]})
    assert meta.tags == [{"n": 0, "m": 7}, {"m": 8}, {"m": 9}]
    bare = KVBatchMeta("p", None, ["a"])
    bare.stamp_tags({"m": [1]})
    assert bare.tags == [{"m": 1}]
    for wrong in (lambda: meta.stamp_tags({"m": [1]}), lambda: KVBatchMeta("p", None, ["a"], tags=[])):
        with pytest.raises(ValueError, match=r"for \d samples"):
            wrong()
    with pytest.raises(ValueError, match="'p'"):
        meta.concat(KVBatchMeta("q", None, []))


@pytest.mark.integration
def test_scalars_of_nemo_rl_are_read_with_one_dimension(driver: DataPlaneClient) -> None:
    column = torch.tensor([[1.0], [0.0]])
    fields = TensorDict({"total_reward": column, "sample_mask": column[:, 0], "other": column}, batch_size=[2])
    driver.put_samples(["a", "b"], "train", fields)
    read = driver.get_samples(["a", "b"], "train", ["total_reward", "sample_mask", "other"])
    assert torch.equal(read["total_reward"], column[:, 0])
    assert torch.equal(read["sample_mask"], column[:, 0])
    assert torch.equal(read["other"], column)


@pytest.mark.integration
@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 2), torch.nested.as_nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)],
    ids=["wide", "ragged"],
)
def test_a_scalar_of_nemo_rl_with_other_rows_is_a_value_error(driver: DataPlaneClient, rows: torch.Tensor) -> None:
    driver.put_samples(["a", "b"], "train", TensorDict({"total_reward": rows}, batch_size=[2]))
    with pytest.raises(ValueError, match=r"'total_reward' has .*expected one scalar per sample"):
        driver.get_samples(["a", "b"], "train", ["total_reward"])
