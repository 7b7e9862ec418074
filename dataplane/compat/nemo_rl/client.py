"""NeMo-RL's `DataPlaneClient` on this service."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from dataplane.client.operations.sample_names import tags_of
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.compat.nemo_rl.meta import KVBatchMeta, framework_type
from dataplane.compat.transfer_queue import fetching, operations, reads
from dataplane.compat.transfer_queue.checkpoints import METADATA, load_into, save_from
from dataplane.compat.transfer_queue.session import Session
from dataplane.compat.transfer_queue.tags import tag_columns
from dataplane.core.durations import as_timeout
from dataplane.core.schema import INPUT_LENGTHS
from dataplane.errors import (
    PartitionNotFoundError,
    SampleNotFoundError,
    TaskNotFoundError,
    UnsupportedValueError,
)
from dataplane.ledger import commands as c

SCALARS = frozenset({"input_lengths", "sample_mask", "total_reward"})
"""The fields that NeMo-RL reads as one scalar per sample (`PROMOTE_1D_FIELDS` of its `data_plane.schema`)."""


class DataPlaneClient:
    """The methods of NeMo-RL's class of the same name, with the behaviour of NeMo-RL's TransferQueue adapter. Create it
    with `build_data_plane_client`. Thread-safe.

    Samples are named by ids. The first put creates a partition. If tasks were registered for a partition, only these
    can claim from it; otherwise the first claim creates the task. A missing sample, field, task or partition raises
    `StorageKeyNotFoundError` (a KeyError and a ValueError); other errors are those of `dataplane.errors`.

    `meta_type`: the class of metas, constructed with the arguments of `KVBatchMeta`. It is NeMo-RL's own `KVBatchMeta`
    if NeMo-RL is installed, otherwise this package's. Methods accept any object with the same attributes.

    _performer: performs operations (generators of steps) on the service. _known_tasks: the (partition, task) pairs that
    a claim of this client has checked.
    """

    def __init__(self, session: Session) -> None:
        """Use `build_data_plane_client`."""
        self._session = session
        self._performer = session.client._performer
        self._known_tasks: set[tuple[str, str]] = set()
        self.meta_type: type[Any] = framework_type("KVBatchMeta") or KVBatchMeta

    # --- by task

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Create the partition, or add tasks to it; existing data stays. Afterwards only registered tasks can claim
        from it, unless `consumer_tasks` was empty in every call. fields (a put adds them), num_samples, grpo_group_size
        and enums have no effect: a batch always has its full size, for any expected number of samples."""
        del fields, num_samples, grpo_group_size, enums
        self._performer.do(_register, partition_id, list(consumer_tasks))

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float | None = 60.0,
    ) -> Any:
        """Claim the oldest `batch_size` samples that have the fields and that the task has not claimed. A task claims
        each sample once. `sequence_lengths` are the values of the tag `input_lengths` (0 for a sample without it); None
        if no sample has the tag.

        Block until that many samples are ready; raise TimeoutError after `timeout_s` without a claim.
        With `blocking=False`, return at once, with an empty meta if fewer are ready. dp_rank is accepted and ignored.
        `StorageKeyNotFoundError` at once if tasks were registered for the partition and this task is not one of them.
        """
        if (partition_id, task_name) not in self._known_tasks:  # checked once per client
            self._performer.do(_check_task, partition_id, task_name)
            self._known_tasks.add((partition_id, task_name))
        request = fetching.BatchRequest(
            partition=partition_id,
            task=task_name,
            fields=tuple(required_fields),
            batch_size=int(batch_size),
            config={},  # for samplers, which this claim does not use
        )
        timeout_s = as_timeout("timeout_s", timeout_s)
        ids, tags = self._performer.do(_claim, request, blocking, timeout_s)
        has_lengths = any(INPUT_LENGTHS in tag for tag in tags)
        return self.meta_type(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=ids,
            fields=list(required_fields),
            sequence_lengths=[int(tag.get(INPUT_LENGTHS, 0)) for tag in tags] if has_lengths else None,
            tags=tags or None,
        )

    def get_data(self, meta: Any, select_fields: list[str] | None = None) -> TensorDict:
        """Call `get_samples` for the meta's samples. ValueError if no fields are named, here or in the meta."""
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("get_data: no fields were named; pass select_fields, or a meta with fields")
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Whether the partition has samples and each task has claimed all of them."""
        return all(self._session.client.check_consumption_status(task, partition_id) for task in task_names)

    # --- by id

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Store fields and tags of N samples atomically. Claims can take a sample as soon as it has the fields that
        they require. Return the meta of the samples, with these fields and tags.

        Objects are rows of a NonTensorStack or of a NumPy array. `UnsupportedValueError` (a
        TypeError) for any other NonTensorData, as NeMo-RL's contract demands."""
        ids = list(sample_ids)
        if not ids:  # nothing to store: the partition is not created either
            return self.meta_type(partition_id=partition_id, task_name=None, sample_ids=[], fields=None)
        tag_list = [dict(tag) for tag in tags] if tags is not None else [{} for _ in ids]
        if fields is not None:
            _check_objects(fields)
        self._performer.do(operations.put, ids, partition_id, fields, tag_columns(tag_list, len(ids)))
        names = None if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118  # not a dict
        return self.meta_type(partition_id=partition_id, task_name=None, sample_ids=ids, fields=names, tags=tag_list)

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """Return these fields of exactly these samples, in this order: dense `[N, ...]` if all rows have one shape,
        otherwise nested; objects in a NonTensorStack. The fields of `SCALARS` are `[N]`, even if they were put as
        `[N, 1]`; rows of any other shape raise ValueError. Claims do not change."""
        if not len(sample_ids):
            return TensorDict({}, batch_size=(0,))
        return self._performer.do(_get, list(sample_ids), partition_id, list(select_fields))

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Drop these samples; ids that do not exist are ignored. None: drop all samples, with a RuntimeWarning if the
        partition has none. The partition itself stays, with its fields and tasks."""
        ids = self._list_ids(partition_id) if sample_ids is None else list(sample_ids)
        if ids:
            self._performer.do(operations.clear_keys, ids, partition_id)
        elif sample_ids is None:
            text = f"clear_samples(None, {partition_id!r}) found nothing: the partition is empty or does not exist"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _list_ids(self, partition: str) -> list[str]:
        return list(self._session.client.kv_list(partition).get(partition, {}))

    # --- lifecycle

    def save_checkpoint(self, checkpoint_dir: str | Path, *, metadata: dict[str, Any] | None = None) -> None:
        """Save a consistent snapshot of all partitions, and the caller's `metadata`."""
        save_from(self._session.client, checkpoint_dir, metadata)

    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Replace all partitions by the saved ones. Return the `metadata` of the checkpoint. FileNotFoundError without
        a checkpoint, `CheckpointError` (a ValueError) for a damaged one; both leave the partitions unchanged."""
        load_into(self._session.client, checkpoint_dir)
        saved = json.loads((Path(checkpoint_dir) / METADATA).read_text(encoding="utf-8"))
        return dict(saved["user_metadata"])

    def close(self) -> None:
        """Leave the service, and stop it if this process started it. Idempotent."""
        self._session.close()


def _check_objects(fields: TensorDict) -> None:
    """`UnsupportedValueError` for a field that is one non-tensor value instead of one per sample. A
    TensorDict wraps NumPy arrays of objects, which have one per sample, in NonTensorData."""
    for name in fields.keys():  # noqa: SIM118  # not a dict
        value = fields.get(name)
        if isinstance(value, NonTensorData) and not isinstance(value.data, np.ndarray):
            raise UnsupportedValueError(
                field=str(name),
                row=None,
                got=f"a bare non-tensor value (NonTensorData of {type(value.data).__name__})",
                hint="A field needs one value per sample: use a NonTensorStack or a NumPy array.",
            )


# --- operations


def _register(session_state: SessionState, partition: str, tasks: Sequence[str]) -> Operation[None]:
    """Create the partition or add tasks to it. With tasks, also record that it has registered tasks: put the sample
    `_registration_id`."""
    yield operations.extend_partition(session_state, partition, tasks=tasks)
    if tasks:
        # In the other order, `_check_task` could reject a claim of such a task between the two steps.
        yield from operations.put(session_state, [_registration_id(partition)], operations.ADAPTER, fields=None)


def _registration_id(partition: str) -> str:
    """Return the id of the sample that exists once any client has registered tasks for the partition."""
    return f"tasks of {partition}"


def _check_task(session_state: SessionState, partition: str, task: str) -> Operation[None]:
    """Raise `TaskNotFoundError` if tasks were registered for the partition, but not this one."""
    try:
        tasks = (yield Send(c.Describe(partition=partition))).result.tasks
        if task not in tasks:
            # Without a registration `list_samples` raises SampleNotFoundError or PartitionNotFoundError (caught below):
            # any task may claim.
            registration = c.Samples(ids=(_registration_id(partition),))
            yield from operations.list_samples(session_state, operations.ADAPTER, registration)
            raise TaskNotFoundError(partition=partition, task=task, known=tasks)
    except (PartitionNotFoundError, SampleNotFoundError):
        return


def _claim(
    session_state: SessionState, request: fetching.BatchRequest, blocking: bool, timeout_s: float
) -> Operation[tuple[list[str], list[dict[str, Any]]]]:
    """Claim the oldest samples. Return their ids and tags. If too few are ready, return empty lists, or with `blocking`
    raise ClaimTimeoutError after `timeout_s`."""
    claimed: c.Claimed | None = yield from fetching.claim_in_order(
        session_state, request, polling=not blocking, wait_s=timeout_s
    )
    if claimed is None:
        return [], []
    return list(claimed.ids), [dict(tag) for tag in tags_of(claimed.tags, len(claimed.ids))]


def _get(
    session_state: SessionState, ids: Sequence[str], partition: str, fields: Sequence[str]
) -> Operation[TensorDict]:
    """Read exactly these fields of these samples, in NeMo-RL's form."""
    data: TensorDict = yield from reads.get_keys(session_state, ids, partition, fields, strict=True)
    values = {name: _to_nemo_value(str(name), value) for name, value in data.items()}
    converted: TensorDict = TensorDict._new_unsafe(values, batch_size=data.batch_size)  # without checks: faster
    return converted


def _to_nemo_value(name: str, value: Any) -> Any:
    """Convert a field to NeMo-RL's form: dense if possible, `[N]` for the fields of `SCALARS`. ValueError if the
    rows of the latter are not scalars."""
    value = dense_if_even(value)
    if name not in SCALARS:
        return value
    if not isinstance(value, Tensor) or value.is_nested:
        got = "rows of several shapes"
    elif value.dim() == 1 or value.shape[1:] == (1,):
        return value.flatten()
    else:
        got = f"rows of shape {list(value.shape[1:])}"
    raise ValueError(f"get_samples: field {name!r} has {got}, expected one scalar per sample ([N] or [N, 1])")


def dense_if_even(value: Any) -> Any:
    """Convert a nested tensor to a dense one if all its rows have one shape. Return other values unchanged."""
    if not isinstance(value, Tensor) or not value.is_nested:
        return value
    rows = value.unbind()
    if len({row.shape for row in rows}) != 1:
        return value
    # If the buffer of a jagged tensor has no gaps between the rows, reshape it without a copy.
    if value.layout is torch.jagged and value.values().shape[0] == len(rows) * len(rows[0]):
        return value.values().reshape(len(rows), *rows[0].shape)
    return torch.stack(rows)
