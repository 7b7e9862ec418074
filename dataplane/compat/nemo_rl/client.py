"""NeMo-RL's `DataPlaneClient` on this service, and its creation from a NeMo-RL configuration."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
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
from dataplane.compat.switch import replaced
from dataplane.compat.transfer_queue import fetching, operations
from dataplane.compat.transfer_queue.interface import METADATA, load_into, save_from
from dataplane.compat.transfer_queue.session import Session, open_session
from dataplane.compat.transfer_queue.settings import Settings, warn_once
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
        self._performer.do(operations.put, ids, partition_id, fields, tag_list)
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
        if sample_ids is None:
            ids = list(self._session.client.kv_list(partition_id).get(partition_id, {}))
        else:
            ids = list(sample_ids)
        if ids:
            self._performer.do(operations.clear_keys, ids, partition_id)
        elif sample_ids is None:
            text = f"clear_samples(None, {partition_id!r}) found nothing: the partition is empty or does not exist"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

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
    data: TensorDict = yield from operations.get_keys(session_state, ids, partition, fields, strict=True)
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


log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("transfer_queue", "rl_dataplane")
ADAPTER = "nemo_rl.data_plane.adapters.transfer_queue"
"""The module of NeMo-RL that the switch can replace."""
_CAPACITY = "dataplane.capacity_bytes is the size of each storage unit"
_UNITS = "every node has a storage unit; without Ray, dataplane.units"
_TRANSPORT = "dataplane.bulk_transport='mooncake' uses Mooncake between hosts, without such buffers"
BLOCKS: dict[str, dict[str, str]] = {
    "simple": {"storage_capacity": _CAPACITY, "num_storage_units": _UNITS},
    "mooncake_cpu": {
        "global_segment_size": _CAPACITY,
        "local_buffer_size": _TRANSPORT,
        "reuse_registered_buffers": _TRANSPORT,
        "staging_buffer_size": _TRANSPORT,
    },
}
"""Per backend, the settings of its block, none of which has an effect, and what replaces each."""
WITHOUT_BLOCK: dict[str, str] = {
    "storage_capacity": _CAPACITY,
    "num_storage_units": _UNITS,
    "global_segment_size": _CAPACITY,
    "local_buffer_size": _TRANSPORT,
    "claim_meta_poll_interval_s": "claims wait on the service without polling",
}
"""The settings outside of the blocks that have no effect, and what replaces each. All but the last
are also settings of the blocks."""


def build_data_plane_client(cfg: Mapping[str, Any] | None, *, bootstrap: bool = True) -> DataPlaneClient:
    """Return a client of the service that `cfg` describes.

    bootstrap: True in the driver, which starts a service if none is found. False in a worker, which only attaches;
    `NotInitializedError` (a RuntimeError) without a service. `dataplane.compat.transfer_queue.init` documents where a
    service is found and started.

    cfg: `enabled` must be true; `impl` is "transfer_queue" (for existing configurations) or "rl_dataplane";
    `controller_address` is the service's address, or `controller_name` its name (`controller.name` of `init`);
    `ack_timeout_ms` is the timeout of a command; `dataplane` has further settings of `DataPlaneConfig`; `objects` is
    that of `init`, by default "pickle" if the switch replaces NeMo-RL's adapter by this package.

    The settings of the block named by `backend` (`simple` or `mooncake_cpu`), the same settings
    without a block, `claim_meta_poll_interval_s` and `observability` have no effect; the driver
    logs one warning for each that is given. As in NeMo-RL, the block of another backend is ignored.

    ValueError for a configuration that is not enabled, for an `impl` or `backend` that NeMo-RL does
    not have, and for an unknown setting in either block; TypeError for a block that is no mapping.
    """
    if cfg is None or not cfg.get("enabled"):
        raise ValueError("build_data_plane_client: the configuration does not enable the data plane; set enabled=True")
    if (cfg.get("observability") or {}).get("enabled"):
        log.warning("observability.enabled is ignored: wrap this client in NeMo-RL's own MetricsDataPlaneClient")
    return DataPlaneClient(session_of(cfg, bootstrap=bootstrap))


def session_of(cfg: Mapping[str, Any], *, bootstrap: bool) -> Session:
    """Open a session of the service that `cfg` describes; see `build_data_plane_client`."""
    _check_choice(cfg, "impl", IMPLEMENTATIONS)
    if cfg.get("backend") is not None:
        _check_choice(cfg, "backend", tuple(BLOCKS))
    blocks = {backend: _block(cfg, backend) for backend in BLOCKS}
    dataplane_settings = {**(cfg.get("dataplane") or {})}  # a copy, which is changed here
    if cfg.get("controller_address"):
        dataplane_settings["address"] = cfg["controller_address"]
    if cfg.get("ack_timeout_ms"):
        dataplane_settings["call_timeout_s"] = _milliseconds(cfg["ack_timeout_ms"]) / 1000
    conf: dict[str, Any] = {
        # The service stores polling_mode for callers of `get_meta`; claims of this client do not use it.
        "controller": {"polling_mode": True, "name": cfg.get("controller_name")},
        "dataplane": dataplane_settings,
    }
    objects = cfg.get("objects") or ("pickle" if replaced(ADAPTER) else None)
    if objects is not None:
        conf["objects"] = objects
    if bootstrap:
        _warn_of_unused(cfg, blocks)
    # A worker neither starts a service nor stores settings in it.
    return open_session(Settings.of(conf), given=bootstrap, start=bootstrap)


def _block(cfg: Mapping[str, Any], backend: str) -> Mapping[str, Any]:
    """Return the settings of a backend's block, empty without one. ValueError for unknown names."""
    block: Any = cfg.get(backend)
    if hasattr(block, "model_dump"):  # NeMo-RL converts the block to a model of pydantic
        block = block.model_dump(exclude_unset=True)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise TypeError(f"{backend}={block!r}: expected a mapping of settings")
    unknown = [f"{backend}.{name}" for name in block if name not in BLOCKS[backend]]
    if unknown:
        raise ValueError(
            f"build_data_plane_client: unknown settings {', '.join(unknown)}; "
            f"the block {backend} has {', '.join(BLOCKS[backend])}"
        )
    return block


def _warn_of_unused(cfg: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn once about each setting that is given and has no effect."""
    backend = cfg.get("backend") or "simple"
    if backend != "simple":
        warn_once(f"backend={backend!r} is not used: samples are in this package's storage units")
    for name, replacement in WITHOUT_BLOCK.items():
        if cfg.get(name) is not None:
            warn_once(f"{name}={cfg[name]!r} is not used: {replacement}")
    for name, value in blocks[backend].items():
        if value is not None:
            warn_once(f"{backend}.{name}={value!r} is not used: {BLOCKS[backend][name]}")


def _milliseconds(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"ack_timeout_ms={str(value)[:40]}: expected a number of milliseconds") from None


def _check_choice(cfg: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if cfg.get(name) not in choices:
        raise ValueError(f"build_data_plane_client: {name}={cfg.get(name)!r}, expected one of {', '.join(choices)}")
