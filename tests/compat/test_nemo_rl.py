"""A script that uses NeMo-RL's `DataPlaneClient` sees the same of `dataplane.compat.nemo_rl` and of the TransferQueue
package through what NeMo-RL's adapter does with it.

NeMo-RL is not on PyPI (its name there is a placeholder of version 0.0.0), so that the adapter that is compared with is
`nemo_reference`, which makes the same calls of the real package.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from dataplane.compat.nemo_rl import DataPlaneClient, KVBatchMeta, build_data_plane_client

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
    with pytest.raises(ValueError, match="off"):
        build_data_plane_client({**cfg, "enabled": False})
    with pytest.raises(ValueError, match="impl='other'"):
        build_data_plane_client({**cfg, "impl": "other"})
    with pytest.raises(ValueError, match="backend='disk'"):
        build_data_plane_client({**cfg, "backend": "disk"})
    with pytest.raises(ValueError, match=r"controller\.name='a b'"):
        build_data_plane_client({**cfg, "controller_name": "a b"})
    with pytest.raises(RuntimeError, match="no service was found"):
        build_data_plane_client(cfg, bootstrap=False)


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
