"""Collectives of one replica group with a deadline, and errors that travel between its ranks."""

from __future__ import annotations

import builtins
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore
from torch.distributed import BroadcastOptions
from torch.distributed.distributed_c10d import _get_process_group_store

from dataplane import errors
from dataplane.core.durations import seconds

_COMPLETE = "all present"
"""The verdict in the store on connections for which all ranks were there; a rank that gave up leaves its number."""
_UNUSED_TAG = 2**31 - 1


class ReplicaGroupError(RuntimeError):
    """The ranks of a replica group disagree, or one of them failed in a way that has no type on the others."""


class ReplicaLostError(ReplicaGroupError, ConnectionError):
    """A rank of the replica group died or closed its connections. The group is of no more use; make a new one."""


class Deadline:
    """A moment by which all of one fetch is to be over."""

    def __init__(self, timeout_s: float) -> None:
        """ValueError for a wait without an end."""
        self.timeout_s = seconds("timeout_s", timeout_s)
        self._end = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    @property
    def left(self) -> timedelta:
        """What is left, never less than a millisecond (zero would mean no limit)."""
        return timedelta(seconds=max(self.left_s, 0.001))


class Siblings:
    """One process group's all-gather and broadcast of bytes, each bounded by a deadline and counted.

    group: a torch.distributed process group. Ranks here are ranks within it. counts: `collectives` and `bytes` say how
    many collectives this rank took part in and how many bytes their buffers had, by purpose ("control", "payload").

    A rank that dies ends the group: with Gloo every later collective on it fails at once. A deadline that passes does
    not, where the collectives are Gloo's: it ends the connections that they used, on every rank, and `join` makes new
    ones. Every rank raises `CallTimeoutError` once for each set of connections that ends, so that all are in step again
    at their next call: the rank that gave up, those that wait with it (at the latest when their own deadline passes),
    and the late one as soon as it comes. With NCCL a deadline that passes ends the group: give the workers another.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.collectives: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._channel: Any = group
        self._turn = 0
        self._ended = False

    def join(self, deadline: Deadline) -> None:
        """Make new connections among the ranks, where the last ones have ended by a deadline that passed.

        Blocks for the siblings, which do the same in their next call. CallTimeoutError where one does not come, or the
        others have given up waiting for this rank.
        """
        if not self._ended:
            return
        self._turn += 1
        store = PrefixStore(f"replica group {self._turn}", _store_of(self.group))
        try:
            self._meet(deadline)
            self._channel = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=deadline.left)
        except RuntimeError as error:
            self._raise_if_given_up(deadline)
            self._give_up()
            raise self._late(deadline) from error
        self._ended = False

    def _meet(self, deadline: Deadline) -> None:
        """Wait until all ranks are here; where one gives up before, it and all that wait raise at once.

        Without it a rank could connect to siblings one after another, each for as long as its deadline allows.
        """
        store = _store_of(self.group)
        if store.add(f"replica group {self._turn} present", 1) == self.size:
            store.compare_set(self._key, "", _COMPLETE)
        with contextlib.suppress(RuntimeError):  # the deadline passes
            store.wait([self._key], deadline.left)
        verdict = store.compare_set(self._key, "", f"{self.rank}").decode()  # the first one holds
        if verdict == f"{self.rank}":
            raise self._late(deadline)
        self._raise_if_given_up(deadline)

    @property
    def device(self) -> torch.device:
        """Where the group's backend wants its buffers: this process's CUDA device for NCCL, else the CPU."""
        if "nccl" in str(dist.get_backend_config(self.group)).lower():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def all_gather(self, mine: bytes, deadline: Deadline) -> list[bytes]:
        """Every rank's `mine`, in rank order; all must be equally long."""
        device = self.device
        source = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(source) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = self._limit(deadline)
        self._run(lambda: self._channel.allgather([gathered], [source], options), deadline)
        self._count("control", len(mine) * self.size)
        return [bytes(record.cpu().numpy()) for record in gathered]

    def broadcast(self, buffer: Tensor, root: int, deadline: Deadline, *, purpose: str = "control") -> None:
        """Fill `buffer` (uint8, on `device`) on every rank with the root's."""
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._limit(deadline)
        self._run(lambda: self._channel.broadcast([buffer], options), deadline)
        self._count(purpose, buffer.numel())

    def broadcast_bytes(self, mine: bytes, size: int, root: int, deadline: Deadline) -> bytes:
        """The root's `mine` on every rank; all know its `size`. What the others pass is ignored."""
        if self.rank == root:
            buffer = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.broadcast(buffer, root, deadline)
        return bytes(buffer.cpu().numpy())

    def name(self, rank: int) -> str:
        """A rank of the group for a message, with its global number."""
        return f"rank {rank} (global rank {dist.get_global_rank(self.group, rank)})"

    def _count(self, purpose: str, size: int) -> None:
        self.collectives[purpose] += 1
        self.bytes[purpose] += size

    def _limit(self, deadline: Deadline) -> timedelta:
        """How long a collective may take by its own clock. Gloo closes all connections when it is over, so it is longer
        than the wait for it: first the siblings are told why (`_give_up`)."""
        return deadline.left if self.device.type != "cpu" else deadline.left + timedelta(days=1)

    def _run(self, start: Callable[[], Any], deadline: Deadline) -> None:
        try:
            start().wait(deadline.left)
        except RuntimeError as error:
            if deadline.left_s <= 0 or "timed out" in str(error).lower():
                self._give_up()
                raise self._late(deadline) from error
            self._raise_if_given_up(deadline)
            self._hang_up()
            raise ReplicaLostError(
                f"rank {self.rank} of a replica group of {self.size} lost a sibling: {error}. Look for the rank that "
                "died or gave up first; the process group has to be made again."
            ) from error

    def _late(self, deadline: Deadline) -> errors.CallTimeoutError:
        what = "fetch through a replica group (a sibling did not take part; is it running the same method?)"
        return errors.CallTimeoutError(what=what, waited_s=deadline.timeout_s, peer=f"its {self.size} ranks")

    def _give_up(self) -> None:
        """End these connections. The siblings learn why, and later who comes late to them."""
        store = _store_of(self.group)
        if store is not None and self.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # a store that is gone went with the process that had it
                store.set(self._key, f"{self.rank}")
                self._ended = True
        self._hang_up()

    def _raise_if_given_up(self, deadline: Deadline) -> None:
        """CallTimeoutError where a sibling has ended these connections because its deadline passed."""
        store, rank = _store_of(self.group), None
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([self._key]):
                verdict = store.get(self._key).decode()
                rank = None if verdict == _COMPLETE else int(verdict)
        if rank is None:
            return
        who = self.name(rank)
        self._ended = True
        self._hang_up()
        raise errors.CallTimeoutError(
            what=f"fetch through a replica group ({who} gave up waiting for this rank or another one; fetch again)",
            waited_s=deadline.timeout_s - deadline.left_s,
            peer=who,
        )

    @property
    def _key(self) -> str:
        return f"replica group {self._turn} given up by"

    def _hang_up(self) -> None:
        """Close this rank's Gloo connections, so that siblings that wait for it, not for the rank that died, learn too.

        Gloo has no call for that; but it closes them all when an operation times out, so one is made to: a receive of
        what no rank sends. One from each sibling: a connection that is closed already fails at once, and closes no
        other. NCCL siblings do not wait for one another, and have their own deadlines.
        """
        if self.device.type != "cpu":
            return
        for sibling in range(self.size):
            if sibling != self.rank:
                with contextlib.suppress(RuntimeError):
                    receive = self._channel.recv([torch.empty(1, dtype=torch.uint8)], sibling, _UNUSED_TAG)
                    receive.wait(timedelta(milliseconds=1))


def _store_of(group: Any) -> Any:
    """The store that the ranks of a group made by torch.distributed met at; None for any other group."""
    with contextlib.suppress(KeyError):
        return _get_process_group_store(group)
    return None


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An exception on its way to the siblings of the rank that raised it. `facts` only for errors of the data plane."""

    rank: int
    name: str
    text: str
    facts: bytes | None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Fault:
        text = str(error.args[0]) if len(error.args) == 1 else str(error)
        facts = None
        if errors.ERROR_TYPES.get(type(error).__name__) is type(error):
            assert isinstance(error, errors.DataPlaneError)
            facts = errors.to_wire(error)[1]
        return cls(rank, type(error).__name__, text, facts)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Fault:
        return msgspec.msgpack.decode(data, type=cls)

    def error(self, who: str) -> Exception:
        """The same error: ours with its facts, a builtin with its text, any other as `ReplicaGroupError`."""
        builtin = getattr(builtins, self.name, None)
        error: Exception
        if self.facts is not None:
            error = errors.from_wire(self.name, self.facts)
        elif isinstance(builtin, type) and issubclass(builtin, Exception) and _takes_text(builtin):
            error = builtin(self.text)
        else:
            error = ReplicaGroupError(f"{who} raised {self.name}: {self.text}")
        error.add_note(f"raised by {who} of this replica group, whose fetch all its ranks share")
        return error


def _takes_text(kind: type[Exception]) -> bool:
    return not issubclass(kind, UnicodeError | ExceptionGroup)
