"""A policy worker on the mixin, a batch of every kind of column, and ranks to fetch it on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dataplane
from dataplane import BatchedDataDict, DataPlaneClient, KVBatchMeta
from dataplane.core import schema
from workers.placement.sharding import NamedSharding
from workers.training.mixin import TQWorkerMixin

NEVER_S = 3600.0
"""The deadline of fetches whose errors must not wait for it: longer than `tests.gloo` waits for a scenario."""
LENGTHS = [5, 0, 40, 17, 3, 3, 8, 21]
LAYOUTS = {
    "tp2": NamedSharding([[0, 1]], ["data_parallel", "tensor_parallel"]),
    "dp2": NamedSharding([0, 1], ["data_parallel"]),
    "dp2 tp2": NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"]),
    "tp2 cp2": NamedSharding([[[0, 2], [1, 3]]], ["data_parallel", "tensor_parallel", "context_parallel"]),
    "pp2 dp1 tp2": NamedSharding([[[0, 1]], [[2, 3]]], ["pipeline_parallel", "data_parallel", "tensor_parallel"]),
    "dp4": NamedSharding([0, 1, 2, 3], ["data_parallel"]),
}
FIELDS = [
    "input_ids",
    "generation_logprobs",
    "fp8",
    "token_mask",
    "routed_experts",
    "dense",
    "images",
    "patches",
    "notes",
]


class Worker(TQWorkerMixin):
    """A policy worker whose log-probs are a known function of its batch."""

    cfg: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, sharding: NamedSharding, rank: int) -> None:
        self.coords = sharding.get_worker_coords(rank)
        self.group: Any = None
        self.puts: list[list[str]] = []
        self.trained: tuple[Any, ...] | None = None
        self.forwarded: BatchedDataDict[Any] | None = None
        self.referenced: BatchedDataDict[Any] | None = None
        self.step: list[Any] = []

    def _local_coords(self) -> dict[str, int]:
        return self.coords

    def _get_replica_group(self) -> Any:
        return self.group

    def _pad_value_dict(self) -> dict[str, Any]:
        return {"input_ids": 99}

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> Any:
        self.trained = (data, loss_fn, eval_mode, gbs, mbs)
        return {"loss": float(data["input_ids"].sum())}

    def begin_train_step(self, *, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        self.step = [(loss_fn, gbs, mbs)]

    def train_microbatch(self, *, data: BatchedDataDict[Any]) -> None:
        self.step.append(data)

    def finish_train_step(self) -> Any:
        return {"loss": float(len(self.step) - 1)}

    def abort_train_step(self) -> None:
        self.step = []

    def get_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.forwarded = data
        return BatchedDataDict({"logprobs": -data["input_ids"].float()})

    def get_reference_policy_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any:
        self.referenced = data
        return {"reference_logprobs": data["input_ids"].float() / (micro_batch_size or 1)}


def rows(lengths: Sequence[int], dtype: torch.dtype, *inner: int) -> list[torch.Tensor]:
    return [torch.randint(0, 90, (length, *inner)).to(dtype) for length in lengths]


def put(client: DataPlaneClient, partition: str, *, pad_to: int | None = 64) -> KVBatchMeta:
    torch.manual_seed(3)
    notes = np.empty(len(LENGTHS), dtype=object)
    notes[:] = [{"turn": i, "tools": ("a", b"\x00")} for i in range(len(LENGTHS))]
    fields = {
        "input_ids": rows(LENGTHS, torch.int64),
        "generation_logprobs": rows(LENGTHS, torch.bfloat16),
        "fp8": rows(LENGTHS[::-1], torch.float8_e4m3fn),
        "token_mask": rows(LENGTHS, torch.bool),
        "routed_experts": rows(LENGTHS, torch.uint8, 2, 3),
        "dense": torch.randn(3, len(LENGTHS)).t(),
        "images": [torch.randn(i + 1, 2 if i % 2 else 3) for i in range(len(LENGTHS))],
        "patches": rows([9 * (i + 1) for i in range(len(LENGTHS))], torch.float32, 4),
        "notes": notes,
    }
    ids = [f"s{i}" for i in range(len(LENGTHS))]
    meta = client.put_samples(ids, partition, fields, mode="create")
    extra = {} if pad_to is None else {schema.GLOBAL_FORWARD_PAD_SEQLEN: pad_to}
    return KVBatchMeta(partition, "train", ids, fields=FIELDS, sequence_lengths=LENGTHS, extra_info=extra).with_handles(
        *(meta.handles or ())
    )


def shards(meta: KVBatchMeta, layout: str) -> dict[int, KVBatchMeta]:
    """Rank -> the meta of its data-parallel rank."""
    sharding = LAYOUTS[layout]
    metas, _ = dataplane.shard_meta_for_dp(meta, dp_world=sharding.get_axis_size("data_parallel"))
    return {rank: metas[sharding.get_worker_coords(rank)["data_parallel"]] for rank in range(sharding.size)}


def worker_on(rank: int, layout: str, address: str) -> Worker:
    """A worker in the middle of its Gloo world: attached, with the process group of its siblings."""
    sharding = LAYOUTS[layout]
    worker = Worker(sharding, rank)
    for place in range(sharding.get_axis_size("data_parallel")):
        siblings = sharding.get_ranks_by_coord(data_parallel=place)
        group = dist.new_group(siblings) if len(siblings) > 1 else None
        if rank in siblings:
            worker.group = group
    worker.fetch_timeout_s = NEVER_S
    worker.setup_data_plane({"address": address, "connect_timeout_s": 60.0})
    return worker


def counted_puts(worker: Worker) -> list[Any]:
    """Return a list to which each successful put of the worker adds an entry."""
    client, puts = worker._require_dp_client(), list[Any]()
    put_samples = client.put_samples

    def counted(*args: Any, **kwargs: Any) -> Any:
        stored = put_samples(*args, **kwargs)
        puts.append(kwargs)
        return stored

    client.put_samples = counted  # type: ignore[method-assign]
    return puts


def unwrapped(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def fingerprint(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "jagged" + fingerprint(value.values()) + fingerprint(value.offsets())
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {value.device} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, list):
        return str([fingerprint(row) for row in value])
    assert isinstance(value, np.ndarray), type(value)
    return repr(value.tolist())


def fingerprints(batch: BatchedDataDict[Any]) -> dict[str, str]:
    return {name: fingerprint(value) for name, value in batch.items()}
