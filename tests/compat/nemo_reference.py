"""What NeMo-RL's TransferQueue adapter does with that package, for comparison.

NeMo-RL itself cannot be installed here: its name on PyPI is a placeholder. This says in our own words which calls of
the package its adapter makes (put by key with empty tags where there are none, fetch by task and look the keys up,
poll until a deadline, densify rows of one shape), so that a script can be run on the real package with it.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

from dataplane.compat.nemo_rl.meta import KVBatchMeta


class Reference:
    def __init__(self, cfg: dict[str, Any], bootstrap: bool) -> None:
        backend = {"SimpleStorage": {"num_data_storage_units": 1}}
        wanted = OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend})
        tq.init(wanted if bootstrap else None)
        self.poll_s = cfg["claim_meta_poll_interval_s"]

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        if fields:
            key = f"schema {time.time_ns()}"
            tq.kv_batch_put([key], partition_id, TensorDict({n: torch.zeros(1) for n in fields}, batch_size=[1]), [{}])
            tq.kv_clear([key], partition_id)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        end, client = time.monotonic() + timeout_s, tq.get_client()
        while True:
            found = client.get_meta(list(required_fields), batch_size, partition_id, task_name=task_name)
            if found.size:
                break
            if not blocking:
                return KVBatchMeta(partition_id, task_name, [], list(required_fields))
            if time.monotonic() >= end:
                raise TimeoutError(f"{task_name} found too little in {partition_id}")
            time.sleep(self.poll_s)
        tags = list(found.custom_meta)
        known = any("input_lengths" in tag for tag in tags)
        return KVBatchMeta(
            partition_id,
            task_name,
            client.kv_retrieve_keys(list(found.global_indexes), partition_id),
            list(required_fields),
            [int(tag.get("input_lengths", 0)) for tag in tags] if known else None,
            tags=tags,
        )

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("no fields")
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        return all(tq.get_client().check_consumption_status(task, partition_id) for task in task_names)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        if not sample_ids:
            return KVBatchMeta(partition_id, None, [])
        told = [dict(tag) for tag in tags] if tags is not None else [{} for _ in sample_ids]
        tq.kv_batch_put(list(sample_ids), partition_id, None if fields is None else fields.detach(), told)
        names = None if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118
        return KVBatchMeta(partition_id, None, list(sample_ids), names, tags=told)

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        if not sample_ids:
            return TensorDict({}, batch_size=(0,))
        data = tq.kv_batch_get(list(sample_ids), partition_id, list(select_fields))
        values = {}
        for name in data.keys():  # noqa: SIM118
            value = data.get(name)
            if isinstance(value, torch.Tensor) and value.is_nested:
                rows = value.unbind()
                value = torch.stack(rows) if len({row.shape for row in rows}) == 1 else value
            values[name] = value
        return TensorDict(values, batch_size=data.batch_size)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        names = list(tq.kv_list(partition_id).get(partition_id, {})) if sample_ids is None else list(sample_ids)
        if names:
            tq.kv_clear(names, partition_id)
        elif sample_ids is None:
            warnings.warn("nothing to clear", RuntimeWarning, stacklevel=2)

    def save_checkpoint(self, checkpoint_dir: str | Path, *, metadata: dict[str, Any] | None = None) -> None:
        tq.save_checkpoint(checkpoint_dir, metadata=metadata)

    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        told = json.loads((Path(checkpoint_dir) / "metadata.json").read_text())
        tq.load_checkpoint(checkpoint_dir)
        return dict(told["user_metadata"])

    def close(self) -> None:
        tq.close()


def build_data_plane_client(cfg: dict[str, Any] | None, *, bootstrap: bool = True) -> Reference:
    if cfg is None or not cfg["enabled"]:
        raise ValueError("off")
    if cfg["impl"] != "transfer_queue":
        raise ValueError("unknown impl")
    return Reference(cfg, bootstrap)
