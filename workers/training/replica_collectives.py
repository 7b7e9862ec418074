"""Collectives of one replica group with a deadline, and the transfer of errors between its ranks."""

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
from dataplane.core import devices
from dataplane.core.durations import as_timeout

_COMPLETE = "all present"
"""Value in the store if all ranks joined these connections. A rank that gave up stores its number instead."""
_SCATTER_TAG = 1
_UNUSED_TAG = 2**31 - 1


class ReplicaGroupError(RuntimeError):
    """The ranks of a replica group disagree, or one of them raised an error whose type the others cannot construct."""


class ReplicaLostError(ReplicaGroupError, ConnectionError):
    """A rank of the replica group died or closed its connections. The group is unusable; create a new one."""


class Deadline:
    """The deadline of one call, for all its collectives together. call: its name for messages."""

    def __init__(self, timeout_s: float | None, call: str = "fetch") -> None:
        """timeout_s: None or infinity for no deadline. ValueError if it is negative."""
        self.timeout_s = as_timeout("timeout_s", timeout_s)
        self.call = call
        self._end = time.monotonic() + self.timeout_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    @property
    def left(self) -> timedelta:
        """The remaining time, at least one millisecond (zero would mean no limit)."""
        return timedelta(seconds=max(self.left_s, 0.001))


class Siblings:
    """All-gather and broadcast of bytes in one process group, each with a deadline and counted.

    group: a torch.distributed process group. Ranks here are ranks within it. `collectives` and `bytes` count this
    rank's collectives and the bytes of their buffers, by purpose ("control", "payload").

    The death of a rank ends the group: with Gloo, every later collective fails at once. A timeout does not end a Gloo
    group: it closes the current connections on every rank, and `join` opens new ones. Every rank raises
    `CallTimeoutError` once per set of closed connections, so that all ranks are in step at their next call: the rank
    that gave up, the ranks that wait with it (at the latest at their own deadline), and the late rank in its next
    collective. With NCCL, a timeout ends the group: create a new one for the workers.

    A set of connections has a number, `_turn`: 0 for those of the process group itself, `_channel` at first. `join`
    makes `_channel` a new Gloo group and increases the number. `_ended`: whether a timeout closed the current set.
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
        """Open new connections among the ranks if a timeout closed the previous ones.

        Blocks for the siblings, which do the same in their next call. CallTimeoutError if a sibling does not take part,
        or if the others gave up waiting for this rank.
        """
        if not self._ended:
            return
        self._turn += 1  # by one on every rank, because each closed set ends with an error on every rank
        # The group has a store: without one, `_give_up` does not set `_ended`.
        store = PrefixStore(f"replica group {self._turn}", _store_of(self.group))
        try:
            self._await_all_ranks(deadline)
            self._channel = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=deadline.left)
        except RuntimeError as error:  # of the store or Gloo; a `CallTimeoutError` passes
            self._raise_if_given_up(deadline)
            self._give_up()
            raise self._timeout_error(deadline) from error
        self._ended = False

    def _await_all_ranks(self, deadline: Deadline) -> None:
        """Wait until all ranks take part. If one gives up earlier, it and all waiting ranks raise at once.

        Without this step, a rank could connect to its siblings one after another and use its full deadline for each.
        """
        store = _store_of(self.group)
        # `compare_set` with "" writes only if the key has no value: the first value stays. It returns the value. Either
        # the last rank writes `_COMPLETE` in time, or the first rank that waits in vain writes its number.
        if store.add(f"replica group {self._turn} present", 1) == self.size:  # this rank is the last one
            store.compare_set(self._outcome_key, "", _COMPLETE)
        with contextlib.suppress(RuntimeError):  # timeout
            store.wait([self._outcome_key], deadline.left)
        outcome = store.compare_set(self._outcome_key, "", f"{self.rank}").decode()
        if outcome == f"{self.rank}":  # no value until the deadline: this rank gives up, and has published it
            raise self._timeout_error(deadline)
        self._raise_if_given_up(deadline)

    @property
    def device(self) -> torch.device:
        """The device for the buffers of the group's backend: this process's current accelerator for NCCL, HCCL and the
        like, otherwise the CPU."""
        return devices.group_device(self.group)

    def all_gather(self, mine: bytes, deadline: Deadline) -> list[bytes]:
        """Return every rank's `mine`, in rank order. All must have the same length. Raises as `_run_collective`."""
        device = self.device
        source = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(source) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = self._limit(deadline)
        self._run_collective(lambda: self._channel.allgather([gathered], [source], options), deadline)
        self._count("control", len(mine) * self.size)
        return [bytes(buffer.cpu().numpy()) for buffer in gathered]

    def broadcast(self, buffer: Tensor, root: int, deadline: Deadline, *, purpose: str = "control") -> None:
        """Copy the root's `buffer` (uint8, on `device`) into the buffer of every rank. Raises as `_run_collective`."""
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0  # the index of the buffer in the list below
        options.timeout = self._limit(deadline)
        self._run_collective(lambda: self._channel.broadcast([buffer], options), deadline)
        self._count(purpose, buffer.numel())

    def broadcast_bytes(self, mine: bytes, size: int, root: int, deadline: Deadline) -> bytes:
        """Return the root's `mine` on every rank. All ranks pass its `size`. The `mine` of other ranks is ignored.
        Raises as `_run_collective`."""
        if self.rank == root:
            buffer = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.broadcast(buffer, root, deadline)
        return bytes(buffer.cpu().numpy())

    def send(self, buffer: Tensor, to: int, deadline: Deadline, *, purpose: str = "control") -> None:
        """Send a buffer (uint8) to one rank, which calls `receive`. Raises as `_run_collective`."""
        buffer = buffer.to(self.device)
        self._run_collective(lambda: self._channel.send([buffer], to, _SCATTER_TAG), deadline)
        self._count(purpose, buffer.numel())

    def receive(self, buffer: Tensor, sender: int, deadline: Deadline, *, purpose: str = "control") -> None:
        """Receive into a buffer (uint8, on `device`) what `sender` sends, of the same size. Raises as
        `_run_collective`."""
        self._run_collective(lambda: self._channel.recv([buffer], sender, _SCATTER_TAG), deadline)
        self._count(purpose, buffer.numel())

    def name(self, rank: int) -> str:
        """Return a description of a rank for messages, with its global rank."""
        return f"rank {rank} (global rank {dist.get_global_rank(self.group, rank)})"

    def _count(self, purpose: str, size: int) -> None:
        self.collectives[purpose] += 1
        self.bytes[purpose] += size

    def _limit(self, deadline: Deadline) -> timedelta:
        """Return the timeout of the collective itself. When it expires, Gloo closes all connections. So for Gloo it is
        longer than the wait, so that `_give_up` can first publish the reason."""
        return deadline.left if self.device.type != "cpu" else deadline.left + timedelta(days=1)

    def _run_collective(self, start: Callable[[], Any], deadline: Deadline) -> None:
        """Call `start`, which starts a collective, and wait for it. `CallTimeoutError` at the deadline, or if a sibling
        gave up; `ReplicaLostError` if a rank is lost."""
        try:
            start().wait(deadline.left)
        except RuntimeError as error:
            if deadline.left_s <= 0 or "timed out" in str(error).lower():
                self._give_up()
                raise self._timeout_error(deadline) from error
            # A closed connection: either a sibling gave up and published it, or a sibling is lost.
            self._raise_if_given_up(deadline)
            self._close_connections()
            raise ReplicaLostError(
                f"rank {self.rank} of a replica group of {self.size} lost a sibling: {error}. Find the rank that "
                "died or gave up first, and create the process group again."
            ) from error

    def _timeout_error(self, deadline: Deadline) -> errors.CallTimeoutError:
        what = (
            f"{deadline.call} through a replica group (a sibling did not take part; check that all run the same method)"
        )
        return errors.CallTimeoutError(what=what, waited_s=deadline.timeout_s, peer=f"its {self.size} ranks")

    def _give_up(self) -> None:
        """Close these connections after a timeout. Store the reason for the siblings, including those that join late.

        `_ended` stays False if `join` cannot open new connections: with NCCL, or without a store.
        """
        store = _store_of(self.group)
        if store is not None and self.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # the store ended with the process that served it
                store.set(self._outcome_key, f"{self.rank}")
                self._ended = True
        self._close_connections()

    def _raise_if_given_up(self, deadline: Deadline) -> None:
        """Raise CallTimeoutError if a sibling closed these connections after a timeout. Close them here first, so that
        the next `join` opens new ones."""
        store, quitter = _store_of(self.group), None
        with contextlib.suppress(RuntimeError):  # the store ended with the process that served it
            if store is not None and store.check([self._outcome_key]):
                outcome = store.get(self._outcome_key).decode()
                quitter = None if outcome == _COMPLETE else int(outcome)
        if quitter is None:
            return
        quitter_name = self.name(quitter)
        self._ended = True
        self._close_connections()
        raise errors.CallTimeoutError(
            what=f"{deadline.call} through a replica group ({quitter_name} gave up waiting for this rank or another "
            f"rank; repeat the {deadline.call})",
            waited_s=deadline.timeout_s - deadline.left_s,
            peer=quitter_name,
        )

    @property
    def _outcome_key(self) -> str:
        """The key in the store for the outcome of these connections: `_COMPLETE`, or the rank that gave up."""
        return f"replica group {self._turn} given up by"

    def _close_connections(self) -> None:
        """Close this rank's Gloo connections, so that the siblings that wait for this rank fail, too.

        Gloo has no call for that, but it closes all connections when an operation times out. So this starts receives
        of messages that no rank sends: one from each sibling, because a receive on a closed connection fails at once
        and closes no other connection. NCCL siblings do not wait for one another, and have their own deadlines.
        """
        if self.device.type != "cpu":
            return
        for sibling in range(self.size):
            if sibling != self.rank:
                with contextlib.suppress(RuntimeError):
                    receive = self._channel.recv([torch.empty(1, dtype=torch.uint8)], sibling, _UNUSED_TAG)
                    receive.wait(timedelta(milliseconds=1))


def _store_of(group: Any) -> Any:
    """Return the rendezvous store of a group made by torch.distributed, or None for any other group."""
    with contextlib.suppress(KeyError):
        return _get_process_group_store(group)
    return None


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An exception in transfer to the siblings of the rank that raised it.

    name: of its class; text: its message; facts: the encoded facts of a data plane error, None for others.
    """

    rank: int
    name: str
    text: str
    facts: bytes | None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Fault:
        """Return the fault that carries `error`. Facts are sent only if the siblings have the same class."""
        # `str` of a KeyError is the repr of its message, so a single argument is used itself.
        text = str(error.args[0]) if len(error.args) == 1 else str(error)
        facts = None
        if errors.ERROR_TYPES.get(type(error).__name__) is type(error):
            assert isinstance(error, errors.DataPlaneError)
            facts = errors.to_wire(error)[1]  # [0] is the name
        return cls(rank, type(error).__name__, text, facts)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Fault:
        return msgspec.msgpack.decode(data, type=cls)

    def to_error(self, who: str) -> Exception:
        """Return the error to raise: a data plane error with its facts, a builtin with its text, any other as
        `ReplicaGroupError`. who: the rank that raised it, for its note."""
        builtin = getattr(builtins, self.name, None)
        error: Exception
        if self.facts is not None:
            error = errors.from_wire(self.name, self.facts)
        elif isinstance(builtin, type) and issubclass(builtin, Exception) and _takes_text(builtin):
            error = builtin(self.text)
        else:
            error = ReplicaGroupError(f"{who} raised {self.name}: {self.text}")
        error.add_note(f"raised by {who} of this replica group; all its ranks share one call")
        return error


def _takes_text(kind: type[Exception]) -> bool:
    """Return whether the constructor of this builtin accepts a single text."""
    return not issubclass(kind, UnicodeError | ExceptionGroup)
