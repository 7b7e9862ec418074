"""One fetch for a replica group: the leader reads and broadcasts to its siblings. On a failure, all ranks raise.

A fetch is four collectives, for any number of columns:

1. An all-gather of one small record per rank: whether it leads, its policy, a digest of its meta, whether it has
   failed, and the size of its next message. The leader reads before it sends its record, so that the record includes a
   failed read. All ranks get the same records and make the same checks: one leader, one policy, one meta, no failure.
   It is also the agreement at the start of a group's first fetch and of the first fetch after a failure.
2. A broadcast of the header (or of the error of the rank that failed).
3. A broadcast of the payload, the jagged bytes of every column in one buffer. If the ranks want different parts of the
   rows, steps 2 and 3 are a scatter instead: an all-gather of what each rank wants, and then the leader reads the parts
   one after another and sends each to the ranks that want it (`workers.training.scatter`).
4. An all-gather of outcomes, so that a failure of one rank on its payload makes all ranks raise.

With "independent" the ranks exchange records once, then fetch without collectives until the policy changes.

A write-back of parts is the reverse: records, an all-gather of what each rank has, the transfer of each part to the
leader, and the outcomes, the leader's put included.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from dataplane.core import devices, failpoints
from dataplane.data.batch import BatchedDataDict
from workers.training.batch_codec import Header, pack, unpack
from workers.training.replica_collectives import Deadline, Fault, ReplicaGroupError, Siblings
from workers.training.scatter import Transfer, gather_parts, receive_part, send_parts

T = TypeVar("T")
FetchPolicy = Literal["auto", "independent", "leader_broadcast"]
POLICIES: tuple[str, ...] = get_args(FetchPolicy)
_WRITE_BACK = "write-back of parts"
_CALLS = (*POLICIES, _WRITE_BACK)
"""The values of a record's `policy`: those of fetches, and a write-back. New ones are added at the end."""
FETCH_TIMEOUT_S = 300.0
"""Default timeout of a fetch through a replica group, from a rank's call to its result. It is well above a client's
`reconnect_s`, because siblings wait while the leader's client waits for a service that restarts."""

_RECORD = struct.Struct("<4sBBBx16sQ16sQ")
"""The encoding of `_Record`: `_MAGIC`, then its fields in order, with a padding byte before the digest."""
_MAGIC = b"TQf2"
_OUTCOME = struct.Struct("<Q")
"""The outcome of a fetch on one rank: the size of its encoded fault, 0 for success."""
NO_DIGEST = bytes(16)


@dataclass(frozen=True)
class _Record:
    """The first message of a rank to its siblings. leads: whether the rank is the leader; digest: of its meta;
    message_bytes: size of its next message, a header or a fault. wanted_digest, wanted_bytes: of the part it wants."""

    leads: bool
    policy: str
    failed: bool
    digest: bytes
    message_bytes: int
    wanted_digest: bytes
    wanted_bytes: int

    def encode(self) -> bytes:
        policy = _CALLS.index(self.policy)
        return _RECORD.pack(
            _MAGIC,
            self.leads,
            policy,
            self.failed,
            self.digest,
            self.message_bytes,
            self.wanted_digest,
            self.wanted_bytes,
        )

    @classmethod
    def decode(cls, data: bytes) -> _Record:
        magic, leads, policy, failed, *rest = _RECORD.unpack(data)
        if magic != _MAGIC or policy >= len(_CALLS):
            raise ReplicaGroupError(
                "the ranks of this replica group make different collective calls at the same time; let all ranks make "
                "the same calls in the same order, and restart the workers"
            )
        return cls(bool(leads), _CALLS[policy], bool(failed), *rest)


@dataclass(frozen=True)
class FetchedPart:
    """A rank's part in a call. If one of these functions raises, every rank of the group raises that error.

    leads: whether this rank is the leader. digest: 16 bytes, equal for equal metas. wanted: the encoded part of the
    rows that this rank wants, b"": whole rows; in a write-back, the description of what it has. read: returns the
    columns of a part; called on the leader of a fetch only.
    """

    leads: Callable[[], bool]
    digest: Callable[[], bytes]
    read: Callable[[bytes], Mapping[str, Any]] | None = None
    wanted: Callable[[], bytes] = bytes


@dataclass(frozen=True)
class _Offer:
    """A rank's input to a fetch: the fields of its record, and its next message, an encoded header or fault.

    flat: the payload, on the leader only. wanted: the part that this rank wants. fault: the exception that this rank
    raised, if any.
    """

    leads: bool = False
    digest: bytes = NO_DIGEST
    wanted: bytes = b""
    message: bytes = b""
    flat: Tensor | None = None
    fault: Exception | None = None


class ReplicaGroup:
    """Fetch as one rank of a replica group. Not thread-safe, like the process group.

    siblings: the group's collectives and their counters; all `ReplicaGroup`s of a process group share one object.
    timeout_s: timeout of each call; the group stays usable after a timeout, see `Siblings`.

    The `mine` of the private methods is this rank's own input; all ranks call them in the same order.
    """

    def __init__(
        self,
        group: Any,
        *,
        timeout_s: float | None = FETCH_TIMEOUT_S,
        siblings: Siblings | None = None,
    ) -> None:
        self.siblings = siblings or Siblings(group)
        self.timeout_s = timeout_s
        self._agreed: str | None = None  # the policy of the last successful call; None after a failure

    @property
    def group(self) -> Any:
        return self.siblings.group

    @property
    def size(self) -> int:
        return self.siblings.size

    @property
    def gpu(self) -> torch.device | None:
        """The CUDA device of the group's backend, to which its leader reads; None: the leader reads to the CPU."""
        return devices.gpu(self.siblings.device)

    def agree(self, part: FetchedPart, policy: str) -> None:
        """Check that the ranks agree on one leader and on `policy`. Skip the check if the last call had this policy
        and succeeded: a sibling that changes its policy alone then waits for this rank's next other call.

        Blocks for the siblings, up to the timeout. Raises on every rank: `ReplicaGroupError` if they disagree, or the
        error of a rank's `leads`; `ReplicaLostError` if a rank died; `CallTimeoutError` if a rank does not take part.
        """
        if self._agreed == policy:
            return
        self._agreed = None
        # Ranks that fetch independently may have different metas, so all send the same digest.
        agreement = FetchedPart(leads=part.leads, digest=lambda: NO_DIGEST)
        deadline = Deadline(self.timeout_s)
        self.siblings.join(deadline)
        self._exchange_records(self._prepare_offer(agreement), policy, deadline)
        self._agreed = policy

    def fetch(self, part: FetchedPart, policy: str, finish: Callable[[BatchedDataDict[Any]], T]) -> T:
        """Call `finish` with the leader's columns on every rank and return its result, or raise on every rank.

        The columns are on the group's device, see `unpack`. Blocks for the siblings, up to the timeout. Raises the
        errors of `agree`, `ReplicaGroupError` if the metas differ, and errors of a rank's `digest`, `read` or `finish`.
        """
        self._agreed = None  # stays so unless the whole fetch succeeds
        deadline = Deadline(self.timeout_s)
        self.siblings.join(deadline)
        mine = self._prepare_offer(part)
        leader, records = self._exchange_records(mine, policy, deadline)
        if len({record.wanted_digest for record in records}) > 1:
            columns = self._scatter(part, mine, leader, records, deadline)
        else:
            message = self.siblings.broadcast_bytes(mine.message, records[leader].message_bytes, leader, deadline)
            header = Header.decode(message)
            failpoints.hit("fetch.between_header_and_payload")
            flat = self._broadcast_payload(header, mine.flat, leader, deadline)
            columns = partial(unpack, header, flat)
        result = self._finish_on_all_ranks(lambda: finish(BatchedDataDict(columns())), deadline)
        self._agreed = policy
        return result

    def _scatter(
        self, part: FetchedPart, mine: _Offer, leader: int, records: list[_Record], deadline: Deadline
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the columns of the part that this rank wants, or raises why the leader could
        not read one."""
        wanted = self._gather_wanted(mine, records, deadline)
        if mine.flat is None or part.read is None:
            return receive_part(self.siblings, leader, deadline)
        own = partial(unpack, Header.decode(mine.message), mine.flat.to(self.siblings.device))
        return send_parts(self.siblings, wanted, own, part.read, deadline)

    def write_back(
        self, part: FetchedPart, plan: Callable[[int, list[bytes]], Sequence[Transfer]], put: Callable[[], None]
    ) -> None:
        """Transfer columns to the leader and call `put` there, or raise on every rank.

        plan: returns the transfers for the leader's rank and the `wanted` of all ranks. All ranks call it with the same
        arguments, so that all get the same transfers or raise the same error. Blocks for the siblings, up to the
        timeout. Raises as `fetch`, and errors of `put`.
        """
        self._agreed = None
        deadline = Deadline(self.timeout_s, "write-back")
        self.siblings.join(deadline)
        mine = self._prepare_offer(part)
        leader, records = self._exchange_records(mine, _WRITE_BACK, deadline)
        transfers = plan(leader, self._gather_wanted(mine, records, deadline))
        placed = gather_parts(self.siblings, transfers, leader, deadline)

        def finish() -> None:
            placed()
            if mine.leads:
                put()

        self._finish_on_all_ranks(finish, deadline)

    def _gather_wanted(self, mine: _Offer, records: list[_Record], deadline: Deadline) -> list[bytes]:
        """Return the `wanted` of all ranks, in their order."""
        most = max(record.wanted_bytes for record in records)
        gathered = self.siblings.all_gather(mine.wanted.ljust(most, b"\0"), deadline)
        return [data[: record.wanted_bytes] for data, record in zip(gathered, records, strict=True)]

    def _prepare_offer(self, part: FetchedPart) -> _Offer:
        """Return this rank's input. Everything that can fail before the transfer is done here; a failure becomes the
        fault of the offer."""
        try:
            leads, digest, wanted = part.leads(), part.digest(), part.wanted()
            if not leads or part.read is None:
                return _Offer(leads, digest, wanted)
            packed = pack(part.read(wanted))
            return _Offer(leads, digest, wanted, message=packed.header.encode(), flat=packed.flat(self.siblings.device))
        except Exception as error:
            return _Offer(message=Fault.of(error, self.siblings.rank).encode(), fault=error)

    def _exchange_records(self, mine: _Offer, policy: str, deadline: Deadline) -> tuple[int, list[_Record]]:
        """Send this rank's record, and check the records of all ranks. Return the leader's rank and all records. Raise
        on every rank if a rank has failed, or if the records do not match."""
        wanted_digest = hashlib.blake2b(mine.wanted, digest_size=16).digest()
        failed_here = mine.fault is not None
        own_record = _Record(
            mine.leads, policy, failed_here, mine.digest, len(mine.message), wanted_digest, len(mine.wanted)
        )
        records = [_Record.decode(data) for data in self.siblings.all_gather(own_record.encode(), deadline)]
        failed = [rank for rank, record in enumerate(records) if record.failed]
        if failed:
            self._raise_first_fault(mine, failed[0], records[failed[0]].message_bytes, deadline)
        return self._check_records(records), records

    def _check_records(self, records: list[_Record]) -> int:
        """Check for one policy, one leader and one meta, and return the rank of the leader. Otherwise
        `ReplicaGroupError`. Every rank has the same records, so all return or all raise."""
        name = self.siblings.name
        policies = {record.policy for record in records}
        if len(policies) > 1:
            policy_of_each = ", ".join(f"{name(rank)} {record.policy!r}" for rank, record in enumerate(records))
            raise ReplicaGroupError(
                "the ranks of a replica group make different calls, or fetch with different policies: "
                f"{policy_of_each}; let all make the same calls with one fetch_policy"
            )
        leaders = [rank for rank, record in enumerate(records) if record.leads]
        if len(leaders) != 1:
            who = " and ".join(map(name, leaders)) if leaders else "none"
            raise ReplicaGroupError(
                f"a replica group must have exactly one leader (coordinate 0 on every replicated axis), but {who} of "
                f"its {self.size} ranks claim to lead; check _local_coords and _get_replica_group"
            )
        leader = leaders[0]
        differing = [rank for rank, record in enumerate(records) if record.digest != records[leader].digest]
        if differing:
            raise ReplicaGroupError(
                f"{' and '.join(map(name, differing))} passed a meta (samples or fields), a layout or a pad length "
                f"that differs from the meta of the leader, {name(leader)}; nothing was transferred. Pass the same to "
                "all ranks"
            )
        return leader

    def _broadcast_payload(self, header: Header, mine: Tensor | None, leader: int, deadline: Deadline) -> Tensor:
        """Broadcast the leader's payload `mine` (None on the others). Return it as uint8 [payload_bytes] on the group's
        device."""
        device = self.siblings.device
        if mine is not None:
            flat = mine.to(device)
        else:
            flat = torch.empty(header.payload_bytes, dtype=torch.uint8, device=device)
        if header.payload_bytes:
            self.siblings.broadcast(flat, leader, deadline, purpose="payload")
        return flat

    def _finish_on_all_ranks(self, finish: Callable[[], T], deadline: Deadline) -> T:
        """Call `finish` and return its result if it succeeds on every rank. Otherwise raise on every rank."""
        mine = _Offer()  # replaced if `finish` fails: an empty message reports success
        results: list[T] = []  # the result of `finish`, if it succeeds here
        try:
            results.append(finish())
        except Exception as error:
            mine = _Offer(message=Fault.of(error, self.siblings.rank).encode(), fault=error)
        outcomes = self.siblings.all_gather(_OUTCOME.pack(len(mine.message)), deadline)
        sizes = [_OUTCOME.unpack(data)[0] for data in outcomes]
        failed = [rank for rank, size in enumerate(sizes) if size]
        if failed:
            self._raise_first_fault(mine, failed[0], sizes[failed[0]], deadline)
        return results[0]

    def _raise_first_fault(self, mine: _Offer, root: int, message_bytes: int, deadline: Deadline) -> NoReturn:
        """Raise this rank's own error, or else the error of rank `root`, the first that failed. All ranks call this,
        because `root` broadcasts its fault of `message_bytes` bytes."""
        fault = Fault.decode(self.siblings.broadcast_bytes(mine.message, message_bytes, root, deadline))
        raise mine.fault if mine.fault is not None else fault.to_error(self.siblings.name(root))


def _broadcast_batched_data_dict(
    data: BatchedDataDict[Any] | None, *, is_leader: bool, src: int, group: Any
) -> BatchedDataDict[Any]:
    """Return the leader's `data` on every rank of `group`, on the device of the group's backend.

    The leader, global rank `src`, passes `data`; its siblings pass None. Columns are those that `pack` supports,
    strings and dicts included. The transfer is a header and one flat payload of jagged bytes (see the module's
    docstring), without pickled tensors. Blocks for the siblings, up to `FETCH_TIMEOUT_S`; a timeout makes the group
    unusable for later calls. Raises the errors of `ReplicaGroup.fetch` on every rank, also if the ranks pass different
    `src`, or a `src` that is not the leader.
    """

    def leads() -> bool:
        if is_leader != (dist.get_rank() == src):
            raise ValueError(
                f"global rank {dist.get_rank()} has is_leader={is_leader}, but src={src}; pass is_leader=True on "
                "rank src only"
            )
        return is_leader

    def read(_: bytes) -> Mapping[str, Any]:
        if data is None:
            raise ValueError("the leader passed data=None; it must pass the data for its siblings")
        return data

    # With `src` as the digest, ranks that pass different `src` raise.
    part = FetchedPart(leads=leads, digest=lambda: src.to_bytes(16, "little"), read=read)
    return ReplicaGroup(group).fetch(part, "leader_broadcast", lambda batch: batch)
