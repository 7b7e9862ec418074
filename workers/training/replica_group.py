"""One fetch for a replica group: the leader reads and broadcasts to its siblings. On a failure, all
ranks raise.

A fetch is three collectives, for any number of columns:

1. An all-gather of one record of fixed size per rank: whether it leads, its policy, a digest of its
   meta, whether it has failed, and the size of its message. The leader reads before it sends its
   record, so that the record includes a failed read. All ranks get the same records and make the
   same checks: one leader, one policy, one meta, no failure. It is also the agreement at the start
   of a group's first fetch and of the first fetch after a failure.
2. A broadcast of the leader's message: the jagged bytes of every column in one buffer, and their
   description at its end. If a rank has failed, its error is broadcast instead, and all ranks raise
   it.
3. An all-gather of records as outcomes, so that a failure of one rank on its batch makes all ranks
raise.

With "independent" the ranks exchange records once, then fetch without collectives until the policy
changes.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dataplane.core import devices
from dataplane.core.durations import as_timeout
from dataplane.core.failpoints import failpoint
from dataplane.data.batch import BatchedDataDict
from dataplane.data.jagged import is_jagged, jagged_from_values, offsets_of, row_lengths
from dataplane.errors import CallTimeoutError
from workers.groups.remote_errors import portable
from workers.transport import pickling
from workers.transport.by_value import cloudpickle

T = TypeVar("T")
FetchPolicy = Literal["auto", "independent", "leader_broadcast"]
POLICIES: tuple[str, ...] = get_args(FetchPolicy)
FETCH_TIMEOUT_S = 300.0
"""Default timeout of a fetch through a replica group, from a rank's call to its result. It is well
above a client's `reconnect_s`, because siblings wait while the leader's client waits for a service
that restarts."""

_RECORD = struct.Struct("<4sBBBx16sQI")
"""The encoding of `_Record`: `_MAGIC`, then its fields in order, with a padding byte before the
digest."""
_MAGIC = b"TQf3"
NO_DIGEST = bytes(16)
_UNUSED_TAG = 2**31 - 1
"""A tag of messages that no rank sends."""


class ReplicaGroupError(RuntimeError):
    """The ranks of a replica group disagree."""


class ReplicaLostError(ReplicaGroupError, ConnectionError):
    """A rank of the replica group died, or gave up and closed its connections. Create a new process
    group."""


class Deadline:
    """The deadline of one fetch, for all its collectives together."""

    def __init__(self, timeout_s: float | None) -> None:
        """timeout_s: None or infinity for no deadline. ValueError if it is negative."""
        self.timeout_s = as_timeout("timeout_s", timeout_s)
        self._end = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    @property
    def left(self) -> timedelta:
        """The remaining time, at least one millisecond (zero would mean no limit)."""
        return timedelta(seconds=max(self.left_s, 0.001))


@dataclass(frozen=True)
class RankFetch:
    """What a rank contributes to a fetch. If one of these functions raises, every rank of the group raises
    that error.

    leads: whether this rank is the leader. digest: 16 bytes, equal for equal metas. read: returns
    the columns; called on the leader only.
    """

    leads: Callable[[], bool]
    digest: Callable[[], bytes]
    read: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class _Record:
    """The first message of a rank to its siblings. message_bytes: size of the buffer that the rank
    broadcasts, if it leads or has failed; layout_bytes: of them, the encoded `pickling.Layout` at
    the end."""

    policy: str
    leads: bool = False
    failed: bool = False
    digest: bytes = NO_DIGEST
    message_bytes: int = 0
    layout_bytes: int = 0

    def encode(self) -> bytes:
        policy = POLICIES.index(self.policy)
        return _RECORD.pack(
            _MAGIC,
            policy,
            self.leads,
            self.failed,
            self.digest,
            self.message_bytes,
            self.layout_bytes,
        )

    @classmethod
    def decode(cls, data: bytes) -> _Record:
        magic, policy, leads, failed, *rest = _RECORD.unpack(data)
        if magic != _MAGIC or policy >= len(POLICIES):
            raise ReplicaGroupError(
                "the ranks of this replica group make different collective calls at the same time; "
                "let all ranks make the same calls in the same order, and restart the workers"
            )
        return cls(POLICIES[policy], bool(leads), bool(failed), *rest)


class ReplicaGroup:
    """Fetch as one rank of a replica group. Not thread-safe, like the process group.

    process_group: a torch.distributed process group, whose own timeout stays as it is. Ranks here are ranks
    within it. timeout_s: timeout of each fetch. After a timeout or the loss of a rank the group is
    unusable: with Gloo, every later collective fails at once on every rank. Create a new process
    group for the workers.
    """

    def __init__(self, process_group: Any, *, timeout_s: float | None = FETCH_TIMEOUT_S) -> None:
        self.process_group = process_group
        self.timeout_s = timeout_s
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._agreed: str | None = None
        """The policy of the last successful call; None after a failure."""

    @property
    def device(self) -> torch.device:
        """The device for the buffers of the group's backend: this process's current accelerator for
        NCCL, HCCL and the like, otherwise the CPU."""
        return devices.process_group_device(self.process_group)

    @property
    def gpu(self) -> torch.device | None:
        """The CUDA device of the group's backend, to which its leader reads; None: the leader reads
        to the CPU."""
        return devices.gpu(self.device)

    def agree(self, leads: Callable[[], bool], policy: str) -> None:
        """Check that the ranks agree on one leader and on `policy`. Skip the check if the last call
        had this policy and succeeded: a sibling that changes its policy alone then waits for this
        rank's next other call.

        Blocks for the siblings, up to the timeout. Raises on every rank: `ReplicaGroupError` if
        they disagree, or the error of a rank's `leads`; `ReplicaLostError` if a rank died;
        `CallTimeoutError` if a rank does not take part.
        """
        if self._agreed == policy:
            return
        self._agreed = None
        record = _Record(policy)
        error = None
        try:
            record = replace(record, leads=leads())
        except Exception as caught:
            error = caught
        self._check(self._exchange(record, error, Deadline(self.timeout_s)))
        self._agreed = policy

    def fetch(self, rank_fetch: RankFetch, policy: str, finish: Callable[[BatchedDataDict[Any]], T]) -> T:
        """Call `finish` with the leader's columns on every rank and return its result, or raise on
        every rank.

        The columns are on the group's device, see `unpack_columns`. Blocks for the siblings, up to
        the timeout. Raises the errors of `agree`, `ReplicaGroupError` if the metas differ, and
        errors of a rank's `digest`, `read` or `finish`.
        """
        self._agreed = None  # stays so unless the whole fetch succeeds
        deadline = Deadline(self.timeout_s)
        record = _Record(policy)
        flat = None
        error = None
        try:
            record = replace(record, leads=rank_fetch.leads(), digest=rank_fetch.digest())
            if record.leads:
                flat, layout_bytes = pack_columns(rank_fetch.read(), self.device)
                record = replace(record, message_bytes=flat.numel(), layout_bytes=layout_bytes)
        except Exception as caught:
            error = caught
        records = self._exchange(record, error, deadline)
        leader = self._check(records)
        failpoint("fetch.between_header_and_payload")
        flat = self._broadcast(flat, leader, records[leader].message_bytes, deadline)
        results: list[T] = []  # the result of `finish`, if it succeeds here
        try:
            columns = unpack_columns(flat, records[leader].layout_bytes)
            results.append(finish(BatchedDataDict(columns)))
        except Exception as caught:
            error = caught
        self._exchange(_Record(policy), error, deadline)
        self._agreed = policy
        return results[0]

    def _exchange(self, record: _Record, error: Exception | None, deadline: Deadline) -> list[_Record]:
        """Send this rank's record and return those of all ranks. If ranks have failed, `error` or
        the error of the first of them is raised on every rank."""
        message = None
        if error is not None:
            message = self._buffer(cloudpickle().dumps(portable(error)))
            record = replace(record, failed=True, message_bytes=message.numel())
        own = self._buffer(record.encode())
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with self._named_errors(deadline):
            work: Any = dist.all_gather(gathered, own, group=self.process_group, async_op=True)
            work.wait(deadline.left)
        records = [_Record.decode(_bytes(data)) for data in gathered]
        first = next((rank for rank, each in enumerate(records) if each.failed), None)
        if first is None:
            return records
        mine = message if first == self.rank else None
        sent = self._broadcast(mine, first, records[first].message_bytes, deadline)
        if error is not None:
            raise error
        received: Exception = pickle.loads(_bytes(sent))  # noqa: S301 (a rank of the same job)
        received.add_note(f"raised by {self._name(first)} of this replica group")
        raise received

    def _buffer(self, data: bytes) -> Tensor:
        """Return a copy of the bytes, uint8, on the group's device."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _broadcast(self, mine: Tensor | None, root: int, nbytes: int, deadline: Deadline) -> Tensor:
        """Return the buffer `mine` of the root (uint8 `[nbytes]`, on the group's device) on every
        rank."""
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device) if mine is None else mine
        with self._named_errors(deadline):
            work: Any = dist.broadcast(flat, group_src=root, group=self.process_group, async_op=True)
            work.wait(deadline.left)
        return flat

    @contextmanager
    def _named_errors(self, deadline: Deadline) -> Iterator[None]:
        """A context for one collective. `CallTimeoutError` at the deadline or at the group's own
        timeout; `ReplicaLostError` if a rank is lost."""
        try:
            yield
        except RuntimeError as error:
            waited_s = deadline.timeout_s - deadline.left_s
            late = deadline.left_s <= 0 or "timed out" in str(error).lower()
            self._close_connections()
            if late:
                what = "fetch through a replica group (a sibling did not take part; check that all run the same method)"
                peer = f"its {self.size} ranks"
                raise CallTimeoutError(what=what, waited_s=waited_s, peer=peer) from error
            raise ReplicaLostError(
                f"rank {self.rank} of a replica group of {self.size} lost a sibling: {error}. Find "
                "the rank that died or gave up first, and create the process group again."
            ) from error

    def _close_connections(self) -> None:
        """Close this rank's Gloo connections, so that its siblings fail, too, and no collective of
        it remains.

        Gloo has no call for that, but it closes all connections when an operation times out. So
        this starts receives of messages that no rank sends: one from each sibling, because a
        receive on a closed connection fails at once and closes no other connection. NCCL siblings
        do not wait for one another, and have their own deadlines.
        """
        if self.device.type != "cpu":
            return
        for sibling in range(self.size):
            if sibling != self.rank:
                nothing = torch.empty(1, dtype=torch.uint8)
                with suppress(RuntimeError):
                    receive = self.process_group.recv([nothing], sibling, _UNUSED_TAG)
                    receive.wait(timedelta(milliseconds=1))

    def _check(self, records: Sequence[_Record]) -> int:
        """Check for one policy, one leader and one meta, and return the rank of the leader.
        Otherwise `ReplicaGroupError`. Every rank has the same records, so all return or all
        raise."""
        policies = {record.policy for record in records}
        if len(policies) > 1:
            each = [f"{self._name(rank)} {record.policy!r}" for rank, record in enumerate(records)]
            raise ReplicaGroupError(
                f"the ranks of a replica group fetch with different policies: {', '.join(each)}; let "
                "all make the same calls with one fetch_policy (tokens= and inner= imply "
                "'independent')"
            )
        leaders = [rank for rank, record in enumerate(records) if record.leads]
        if len(leaders) != 1:
            who = " and ".join(map(self._name, leaders)) if leaders else "none"
            raise ReplicaGroupError(
                "a replica group must have exactly one leader (coordinate 0 on every replicated "
                f"axis), but {who} of its {self.size} ranks claim to lead; check _local_coords and "
                "_get_replica_group"
            )
        leader = leaders[0]
        expected = records[leader].digest
        differing = [rank for rank, record in enumerate(records) if record.digest != expected]
        if differing:
            raise ReplicaGroupError(
                f"{' and '.join(map(self._name, differing))} passed a meta (samples or fields), a "
                "layout or a pad length that differs from the meta of the leader, "
                f"{self._name(leader)}; nothing was transferred. Pass the same to all ranks"
            )
        return leader

    def _name(self, rank: int) -> str:
        """Return a description of a rank for messages, with its global rank."""
        return f"rank {rank} (global rank {dist.get_global_rank(self.process_group, rank)})"


class _Jagged(NamedTuple):
    """A jagged column on its way. values: `[T, *inner]` without holes; lengths: int64 row lengths
    as bytes, one object for all columns that share them, which is then pickled once."""

    values: Tensor
    lengths: bytes


def pack_columns(columns: Mapping[str, Any], device: torch.device) -> tuple[Tensor, int]:
    """Return (one buffer, uint8, on `device`; the bytes of the layout at its end) for
    `unpack_columns`.

    Tensors on any devices are copied once, without padding of rows; all other values are pickled.
    `NotSerializableError` for values that cannot be.
    """
    shared: dict[bytes, bytes] = {}
    plain: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, Tensor) and value.is_nested:
            values, lengths = _values_and_lengths(value)
            value = _Jagged(values, shared.setdefault(lengths, lengths))
        plain[str(name)] = value
    packed = pickling.pack(plain, what=f"a batch of the columns {', '.join(plain)}")
    layout = msgspec.msgpack.encode(packed.layout)
    flat = torch.empty(packed.nbytes + len(layout), dtype=torch.uint8, device=device)
    packed.write_flat(flat)
    flat[packed.nbytes :] = torch.frombuffer(bytearray(layout), dtype=torch.uint8)
    return flat, len(layout)


def unpack_columns(flat: Tensor, layout_bytes: int) -> dict[str, Any]:
    """Return the columns of a buffer that `pack_columns` has filled, on its device.

    Jagged columns are views of `flat`, and columns with equal lengths share one offsets tensor.
    Other tensors are copies, so that a reference to a small column does not keep the buffer in
    memory.
    """
    encoded = _bytes(flat[flat.numel() - layout_bytes :])
    layout = pickling.decode_layout(encoded)
    offsets_by_lengths: dict[bytes, tuple[Tensor, tuple[int, int]]] = {}
    columns: dict[str, Any] = pickling.load_flat(layout, flat)
    for name, value in columns.items():
        if isinstance(value, _Jagged):
            if value.lengths not in offsets_by_lengths:
                lengths = torch.tensor(np.frombuffer(value.lengths, np.int64))
                span = (min(lengths.tolist(), default=0), max(lengths.tolist(), default=0))
                offsets_by_lengths[value.lengths] = (offsets_of(lengths).to(flat.device), span)
            offsets, span = offsets_by_lengths[value.lengths]
            columns[name] = jagged_from_values(value.values, offsets, span=span)
        elif isinstance(value, Tensor):
            columns[name] = value.clone()
        elif isinstance(value, list):
            columns[name] = [row.clone() if isinstance(row, Tensor) else row for row in value]
    return columns


def _values_and_lengths(nested: Tensor) -> tuple[Tensor, bytes]:
    """Return (values [T, *inner] without holes, int64 row lengths as bytes) of a nested tensor."""
    jagged: Any = nested
    if is_jagged(jagged) and jagged.lengths() is None:  # no holes between the rows
        offsets = jagged.offsets()
        values = jagged.values()[int(offsets[0]) : int(offsets[-1])]
        return values, row_lengths(jagged).cpu().numpy().tobytes()
    rows = list(nested.unbind())  # with holes, or another kind of nested tensor: copy the rows
    values = torch.cat(rows) if rows else torch.empty(0, dtype=nested.dtype)
    return values, np.array([row.shape[0] for row in rows], np.int64).tobytes()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _broadcast_batched_data_dict(
    data: BatchedDataDict[Any] | None, *, is_leader: bool, src: int, group: Any
) -> BatchedDataDict[Any]:
    """Return the leader's `data` on every rank of `group`, on the device of the group's backend.

    The leader, global rank `src`, passes `data`; its siblings pass None. Columns are tensors,
    jagged ones without padding, and any values that can be pickled. Blocks for the siblings, up to
    `FETCH_TIMEOUT_S`; a timeout makes the group unusable for later calls. Raises the errors of
    `ReplicaGroup.fetch` on every rank, also if the ranks pass different `src`, or a `src` that is
    not the leader.
    """

    def leads() -> bool:
        if is_leader != (dist.get_rank() == src):
            raise ValueError(
                f"global rank {dist.get_rank()} has is_leader={is_leader}, but src={src}; pass "
                "is_leader=True on rank src only"
            )
        return is_leader

    def read() -> Mapping[str, Any]:
        if data is None:
            raise ValueError("the leader passed data=None; it must pass the data for its siblings")
        return data

    # With `src` as the digest, ranks that pass different `src` raise.
    rank_fetch = RankFetch(leads=leads, digest=lambda: src.to_bytes(16, "little"), read=read)
    return ReplicaGroup(group).fetch(rank_fetch, "leader_broadcast", lambda batch: batch)
