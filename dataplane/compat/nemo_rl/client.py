"""NeMo-RL's `DataPlaneClient` over this service."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from dataplane.client.operations.sample_names import tags_of
from dataplane.client.operations.steps import Operation, Send
from dataplane.client.session_state import SessionState
from dataplane.compat.nemo_rl.meta import KVBatchMeta, framework_type
from dataplane.compat.transfer_queue import fetching, reads
from dataplane.compat.transfer_queue import operations as mine
from dataplane.compat.transfer_queue.checkpoints import METADATA, load_into, save_from
from dataplane.compat.transfer_queue.session import Session
from dataplane.compat.transfer_queue.tags import tag_columns
from dataplane.core.durations import seconds
from dataplane.core.schema import INPUT_LENGTHS
from dataplane.errors import PartitionNotFoundError, SampleNotFoundError, TaskNotFoundError
from dataplane.ledger import commands as c

SCALARS = frozenset({"input_lengths", "sample_mask", "total_reward"})
"""The fields that NeMo-RL reads as one scalar per sample (`PROMOTE_1D_FIELDS` of its `data_plane.schema`)."""


class DataPlaneClient:
    """The methods of NeMo-RL's class of that name, as its TransferQueue adapter does them. Made by
    `build_data_plane_client`. Thread-safe.

    Samples are named by ids. The first put makes a partition. If tasks were registered for a partition, only these can
    claim from it; otherwise the first claim makes the task. What is not there is a `StorageKeyNotFoundError` (a
    KeyError and a ValueError); other errors are those of `dataplane.errors`.

    `meta_type`: the class of metas, made with the arguments of `KVBatchMeta`. It is NeMo-RL's own `KVBatchMeta` where
    NeMo-RL is installed, and this package's elsewhere. Any object with its attributes is accepted as an argument.
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
        """Make the partition, or add fields and tasks to it; nothing that it has is lost. From then on only registered
        tasks can claim from it, unless `consumer_tasks` was always empty. num_samples, grpo_group_size and enums are
        taken and not used: batches are always whole, whatever was expected."""
        del num_samples, grpo_group_size, enums
        self._performer.do(_register, partition_id, list(fields), list(consumer_tasks))

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> Any:
        """Claim the oldest `batch_size` samples that have the fields and that the task has not claimed; each goes to
        one claim of a task only. Lengths are those of the tag `input_lengths`.

        Waits on the service until there are so many; TimeoutError after `timeout_s`, having claimed nothing.
        `blocking=False` answers at once, with an empty meta if there are fewer. dp_rank is taken and not used.
        `StorageKeyNotFoundError` at once, if tasks were registered for the partition and this is not one of them.
        """
        if (partition_id, task_name) not in self._known_tasks:
            self._performer.do(_check_task, partition_id, task_name)
            self._known_tasks.add((partition_id, task_name))
        asked = fetching.Asked(
            partition=partition_id,
            task=task_name,
            fields=tuple(required_fields),
            batch_size=int(batch_size),
            config={},
        )
        ids, tags = self._performer.do(_claim, asked, blocking, seconds("timeout_s", timeout_s))
        known = any(INPUT_LENGTHS in tag for tag in tags)
        return self.meta_type(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=ids,
            fields=list(required_fields),
            sequence_lengths=[int(tag.get(INPUT_LENGTHS, 0)) for tag in tags] if known else None,
            tags=tags or None,
        )

    def get_data(self, meta: Any, select_fields: list[str] | None = None) -> TensorDict:
        """`get_samples` of the meta's samples. ValueError where neither `select_fields` nor the meta names fields."""
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("get_data: name the fields, in select_fields or in the meta")
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Whether there are samples, and each task has claimed all of them."""
        return all(self._session.client.check_consumption_status(task, partition_id) for task in task_names)

    # --- by id

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Store fields and tags of N samples, visible all at once or not at all; having a field is what claims wait
        for. Returns their meta, with these fields and tags."""
        ids = list(sample_ids)
        if not ids:
            return self.meta_type(partition_id=partition_id, task_name=None, sample_ids=[], fields=None)
        told = [dict(tag) for tag in tags] if tags is not None else [{} for _ in ids]
        self._performer.do(mine.put, ids, partition_id, fields, tag_columns(told, len(ids)))
        names = None if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118  # not a dict
        return self.meta_type(partition_id=partition_id, task_name=None, sample_ids=ids, fields=names, tags=told)

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """These fields of exactly these samples, in this order: dense `[N, ...]` where all rows have one shape, else
        nested; objects in a NonTensorStack. The fields of `SCALARS` are `[N]`, also where they were put as `[N, 1]`,
        and a ValueError where their rows have another shape. No task's claims change."""
        if not len(sample_ids):
            return TensorDict({}, batch_size=(0,))
        return self._performer.do(_get, list(sample_ids), partition_id, list(select_fields))

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Drop those of these samples that are there; None: all, with a RuntimeWarning where there are none. What the
        partition has registered stays."""
        names = list(sample_ids) if sample_ids is not None else [*self._keys(partition_id)]
        if names:
            self._performer.do(mine.clear_keys, names, partition_id)
        elif sample_ids is None:
            why = f"clear_samples(None, {partition_id!r}) found nothing: the partition is empty or unknown"
            warnings.warn(why, RuntimeWarning, stacklevel=2)

    def _keys(self, partition: str) -> Sequence[str]:
        return list(self._session.client.kv_list(partition).get(partition, {}))

    # --- lifecycle

    def save_checkpoint(self, checkpoint_dir: str | Path, *, metadata: dict[str, Any] | None = None) -> None:
        """Save all partitions as they are together at one instant, and what the caller adds."""
        save_from(self._session.client, checkpoint_dir, metadata)

    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Bring back what was saved, in place of what is there; returns the `metadata` that was saved with it.
        FileNotFoundError where there is no checkpoint, `CheckpointError` (a ValueError) for a damaged one; then nothing
        has changed."""
        load_into(self._session.client, checkpoint_dir)
        said = json.loads((Path(checkpoint_dir) / METADATA).read_text(encoding="utf-8"))
        return dict(said["user_metadata"])

    def close(self) -> None:
        """Leave the service, which ends if it was started here. Idempotent."""
        self._session.close()


# --- operations


def _register(
    session_state: SessionState, partition: str, fields: Sequence[str], tasks: Sequence[str]
) -> Operation[None]:
    yield mine.extend(session_state, partition, tasks=tasks)
    if tasks:
        # After the tasks themselves: a claim between the two steps makes its task, as before the registration.
        yield from mine.put(session_state, [_registration(partition)], mine.ADAPTER, None)


def _registration(partition: str) -> str:
    """The id of the sample whose existence says that tasks were registered for a partition, by any client."""
    return f"tasks of {partition}"


def _check_task(session_state: SessionState, partition: str, task: str) -> Operation[None]:
    """`TaskNotFoundError` if tasks were registered for the partition, and it does not have this one."""
    try:
        tasks = (yield Send(c.Describe(partition=partition))).result.tasks
        if task not in tasks:
            yield from mine.listed(session_state, mine.ADAPTER, c.Samples(ids=(_registration(partition),)))
            raise TaskNotFoundError(partition=partition, task=task, known=tasks)
    except (PartitionNotFoundError, SampleNotFoundError):
        return


def _claim(
    session_state: SessionState, asked: fetching.Asked, blocking: bool, timeout_s: float
) -> Operation[tuple[list[str], list[dict[str, Any]]]]:
    found: c.Claimed | None = yield from fetching.claim_in_order(
        session_state, asked, polling=not blocking, wait_s=timeout_s
    )
    if found is None:
        return [], []
    return list(found.ids), [dict(tag) for tag in tags_of(found.tags, len(found.ids))]


def _get(
    session_state: SessionState, ids: Sequence[str], partition: str, fields: Sequence[str]
) -> Operation[TensorDict]:
    data: TensorDict = yield from reads.get_keys(session_state, ids, partition, fields, True)
    values = {name: _as_read(str(name), value) for name, value in data.items()}
    made: TensorDict = TensorDict._new_unsafe(values, batch_size=data.batch_size)
    return made


def _as_read(name: str, value: Any) -> Any:
    value = dense_if_even(value)
    if name not in SCALARS:
        return value
    if not isinstance(value, Tensor) or value.is_nested:
        found = "rows of several shapes"
    elif value.dim() == 1 or value.shape[1:] == (1,):
        return value.flatten()
    else:
        found = f"rows of shape {list(value.shape[1:])}"
    raise ValueError(f"get_samples: field {name!r} has {found}, expected one scalar per sample ([N] or [N, 1])")


def dense_if_even(value: Any) -> Any:
    """A nested tensor whose rows have one shape as a dense one; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_nested:
        return value
    rows = value.unbind()
    if len({row.shape for row in rows}) != 1:
        return value
    if value.layout is torch.jagged and value.values().shape[0] == len(rows) * len(rows[0]):
        return value.values().reshape(len(rows), *rows[0].shape)
    return torch.stack(rows)
