"""One fetch for a whole replica group: the leader reads, one broadcast feeds its siblings, or all of them raise.

A fetch is four collectives, however many columns it has:

1. an all-gather of one small record per rank: is it the leader, under which policy, a digest of its meta, whether it
   has failed already, and the size of what it would say next. The leader reads before it sends its record, so that a
   read that fails is known here. Every rank then sees the same records and judges alike: one leader, one policy, one
   meta, no failure. This is also the agreement that a group's first fetch, and one after a failure, begins with.
2. a broadcast of the header (or of the error of the rank that failed),
3. a broadcast of the payload, the jagged bytes of every column in one buffer,
4. an all-gather of outcomes, so that a rank that fails on its payload fails all.

Under "independent" the ranks exchange records once, then fetch without collectives until the policy changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from dataplane.core import failpoints
from dataplane.data.batch import BatchedDataDict
from workers.training.batch_codec import Header, pack, unpack
from workers.training.replica_collectives import Deadline, Fault, ReplicaGroupError, Siblings

T = TypeVar("T")
FetchPolicy = Literal["auto", "independent", "leader_broadcast"]
POLICIES: tuple[str, ...] = get_args(FetchPolicy)
FETCH_TIMEOUT_S = 300.0
"""How long a fetch through a replica group may take, from a rank's call to its result, unless told otherwise. Well
above a client's `reconnect_s`: siblings wait while the leader's client waits for a service that restarts."""

_RECORD = struct.Struct("<4sBBBx16sQ")
_MAGIC = b"TQf1"
_OUTCOME = struct.Struct("<Q")
NO_DIGEST = bytes(16)


@dataclass(frozen=True)
class _Record:
    """What a rank tells its siblings first; `said_bytes` is the size of its header, or of its fault if it failed."""

    leads: bool
    policy: str
    failed: bool
    digest: bytes
    said_bytes: int

    def encode(self) -> bytes:
        policy = POLICIES.index(self.policy)
        return _RECORD.pack(_MAGIC, self.leads, policy, self.failed, self.digest, self.said_bytes)

    @classmethod
    def decode(cls, data: bytes) -> _Record:
        magic, leads, policy, failed, digest, said_bytes = _RECORD.unpack(data)
        if magic != _MAGIC or policy >= len(POLICIES):
            raise ReplicaGroupError("the ranks of this replica group are in different collectives; restart the workers")
        return cls(bool(leads), POLICIES[policy], bool(failed), digest, said_bytes)


@dataclass(frozen=True)
class FetchedPart:
    """A rank's part in a fetch. Whatever these raise, every rank of the group raises.

    leads: whether this rank is the leader; digest: 16 bytes that are equal where the metas are; read: the columns,
    called on the leader only.
    """

    leads: Callable[[], bool]
    digest: Callable[[], bytes]
    read: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class _Offer:
    """What a rank comes with: its side of the record, and what it would say next, a header or a fault."""

    leads: bool = False
    digest: bytes = NO_DIGEST
    said: bytes = b""
    flat: Tensor | None = None
    fault: Exception | None = None


class ReplicaGroup:
    """The fetches of one replica group, as one of its ranks makes them. Not thread-safe, like the group itself.

    siblings: the group's collectives and what they cost so far; all `ReplicaGroup`s of a process group share one.
    timeout_s bounds each call; after one that took longer the group works on, see `Siblings`.
    """

    def __init__(self, group: Any, *, timeout_s: float = FETCH_TIMEOUT_S, siblings: Siblings | None = None) -> None:
        self.siblings = siblings or Siblings(group)
        self.timeout_s = timeout_s
        self._agreed: str | None = None

    @property
    def group(self) -> Any:
        return self.siblings.group

    @property
    def size(self) -> int:
        return self.siblings.size

    def agree(self, part: FetchedPart, policy: str) -> None:
        """See to it that the ranks agree on one leader and on `policy`, unless they did and nothing failed since.

        Blocks for the siblings, up to the timeout. Raises on every rank: `ReplicaGroupError` where they disagree, what
        a rank's `leads` raised; `ReplicaLostError` and `CallTimeoutError` where one is gone or does not come.
        """
        if self._agreed == policy:
            return
        self._agreed = None
        agreement = FetchedPart(leads=part.leads, digest=lambda: NO_DIGEST, read=part.read)
        deadline = Deadline(self.timeout_s)
        self.siblings.join(deadline)
        self._exchange(self._offer(agreement, reads=False), policy, deadline)
        self._agreed = policy

    def fetch(self, part: FetchedPart, policy: str, finish: Callable[[BatchedDataDict[Any]], T]) -> T:
        """`finish` of the leader's columns, on every rank, or an error on every rank.

        The columns that `finish` gets are on the group's device, see `unpack`. Blocks for the siblings, up to the
        timeout. Raises as `agree` does, also for metas that differ, and what the leader's `read` or any rank's
        `finish` raised.
        """
        self._agreed = None
        deadline = Deadline(self.timeout_s)
        self.siblings.join(deadline)
        mine = self._offer(part, reads=True)
        leader, said_bytes = self._exchange(mine, policy, deadline)
        header = Header.decode(self.siblings.broadcast_bytes(mine.said, said_bytes, leader, deadline))
        failpoints.hit("fetch.between_header_and_payload")
        flat = self._payload(header, mine.flat, leader, deadline)
        result = self._conclude(lambda: finish(BatchedDataDict(unpack(header, flat))), deadline)
        self._agreed = policy
        return result

    def _offer(self, part: FetchedPart, *, reads: bool) -> _Offer:
        """What this rank comes with. Everything that can fail before bytes move has been done when this returns."""
        try:
            leads, digest = part.leads(), part.digest()
            if not (leads and reads):
                return _Offer(leads, digest)
            packed = pack(part.read())
            return _Offer(leads, digest, said=packed.header.encode(), flat=packed.flat())
        except Exception as error:
            return _Offer(said=Fault.of(error, self.siblings.rank).encode(), fault=error)

    def _exchange(self, mine: _Offer, policy: str, deadline: Deadline) -> tuple[int, int]:
        """The leader's rank and the size of its header, once all records are in; raises where they are not one."""
        record = _Record(mine.leads, policy, mine.fault is not None, mine.digest, len(mine.said)).encode()
        records = [_Record.decode(data) for data in self.siblings.all_gather(record, deadline)]
        failed = [rank for rank, record in enumerate(records) if record.failed]
        if failed:
            self._raise(mine, failed[0], records[failed[0]].said_bytes, deadline)
        leader = self._judge(records)
        return leader, records[leader].said_bytes

    def _judge(self, records: list[_Record]) -> int:
        """The one leader. Every rank sees the same records, so all return or all raise."""
        name = self.siblings.name
        policies = {record.policy for record in records}
        if len(policies) > 1:
            each = ", ".join(f"{name(rank)} {record.policy!r}" for rank, record in enumerate(records))
            raise ReplicaGroupError(f"the ranks of a replica group fetch under different policies: {each}")
        leaders = [rank for rank, record in enumerate(records) if record.leads]
        if len(leaders) != 1:
            who = " and ".join(map(name, leaders)) if leaders else "none"
            raise ReplicaGroupError(
                f"a replica group has exactly one leader (coordinate 0 on every replicated axis), but of {self.size} "
                f"ranks {who} said so; look at _local_coords and _get_replica_group"
            )
        leader = leaders[0]
        strays = [rank for rank, record in enumerate(records) if record.digest != records[leader].digest]
        if strays:
            raise ReplicaGroupError(
                f"{' and '.join(map(name, strays))} fetch with a meta (samples, fields or padding) other than that of "
                f"the leader, {name(leader)}; nothing was fetched"
            )
        return leader

    def _payload(self, header: Header, mine: Tensor | None, leader: int, deadline: Deadline) -> Tensor:
        """The leader's payload, uint8 [payload_bytes] on the group's device."""
        device = self.siblings.device
        if mine is not None:
            flat = mine.to(device)
        else:
            flat = torch.empty(header.payload_bytes, dtype=torch.uint8, device=device)
        if header.payload_bytes:
            self.siblings.broadcast(flat, leader, deadline, purpose="payload")
        return flat

    def _conclude(self, finish: Callable[[], T], deadline: Deadline) -> T:
        """What `finish` returns, if it returns on every rank."""
        mine, results = _Offer(), []
        try:
            results.append(finish())
        except Exception as error:
            mine = _Offer(said=Fault.of(error, self.siblings.rank).encode(), fault=error)
        outcomes = self.siblings.all_gather(_OUTCOME.pack(len(mine.said)), deadline)
        sizes = [_OUTCOME.unpack(data)[0] for data in outcomes]
        failed = [rank for rank, size in enumerate(sizes) if size]
        if failed:
            self._raise(mine, failed[0], sizes[failed[0]], deadline)
        return results[0]

    def _raise(self, mine: _Offer, root: int, said_bytes: int, deadline: Deadline) -> NoReturn:
        """Raise this rank's own fault, else that of rank `root`, the first that failed."""
        fault = Fault.decode(self.siblings.broadcast_bytes(mine.said, said_bytes, root, deadline))
        raise mine.fault if mine.fault is not None else fault.error(self.siblings.name(root))


def _broadcast_batched_data_dict(
    data: BatchedDataDict[Any] | None, *, is_leader: bool, src: int, group: Any
) -> BatchedDataDict[Any]:
    """The leader's `data` on every rank of `group`, on the device that the group's backend wants.

    The leader, global rank `src`, passes `data`; its siblings pass None. Columns are what `pack` takes, strings and
    dicts included. A header and one flat payload of the jagged bytes travel (see this module's top), no pickled
    tensors. Blocks for the siblings, up to `FETCH_TIMEOUT_S`; a call that takes longer ends the group for later ones.
    Raises on every rank, as `ReplicaGroup.fetch` does, also where ranks name different `src`, or one that is not the
    leader.
    """

    def leads() -> bool:
        if is_leader != (dist.get_rank() == src):
            raise ValueError(f"global rank {dist.get_rank()} has is_leader={is_leader}, but src is {src}")
        return is_leader

    def read() -> Mapping[str, Any]:
        if data is None:
            raise ValueError("the leader has to pass the data that its siblings are to get")
        return data

    part = FetchedPart(leads=leads, digest=lambda: src.to_bytes(16, "little"), read=read)
    return ReplicaGroup(group).fetch(part, "leader_broadcast", lambda batch: batch)
