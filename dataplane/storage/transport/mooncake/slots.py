"""Slots: staging memory for payloads sent by the transfer engine, and the only memory that is ever registered.

A payload is in a slot of its sender, after a unique tag. The receiver's engine reads tag and payload together into a
slot of the receiver. A read that reaches a slot with another payload, or another process at the same address, returns
another tag.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.mooncake.engine import DONE, PENDING, Engine, EngineError, address_of, make_immortal
from dataplane.storage.transport.request_chunks import READ_BYTES, Bytes

log = logging.getLogger(__name__)

SLOT_BYTES = READ_BYTES
"""Maximum payload of a slot, so a transfer is never longer than one request."""
SLOTS = 16
"""Slots of each client and each storage unit, 64 MiB in total."""
TAG_BYTES = 16
HEAD_BYTES = 64
"""The payload begins at a cache line, directly after the tag."""
REST_S = 60.0
"""Time for which a slot is not reused after a failed transfer, because parts of the transfer may still arrive."""
CLOSE_S = 5.0  # maximum wait of `close` for transfers
_PAUSES_S = (0.00005, 0.0002, 0.001)  # between polls of a transfer, see `pause_s`


@dataclass(eq=False)
class Slot:
    """Memory for one payload, used exclusively by its holder from `take` to `give`. address: where the memory begins.
    transfer: the engine's id of the transfer in flight. rests_until: not reused before this time.monotonic()."""

    memory: Bytes
    address: int
    transfer: int | None = field(default=None)
    rests_until: float = field(default=0.0)

    def payload(self, nbytes: int) -> Bytes:
        """Return the first `nbytes` of the payload, without a copy."""
        return self.memory[HEAD_BYTES : HEAD_BYTES + nbytes]

    @property
    def tag(self) -> bytes:
        return self.memory[HEAD_BYTES - TAG_BYTES : HEAD_BYTES].tobytes()

    @tag.setter
    def tag(self, tag: bytes) -> None:
        self.memory[HEAD_BYTES - TAG_BYTES : HEAD_BYTES] = np.frombuffer(tag, np.uint8)


class Slots:
    """The slots of one engine; they own the engine. Thread-safe. Raises EngineError if registration fails.

    `_returned`: released slots whose transfer has not ended or whose rest is not over. `_trial_slot`: a slot without a
    payload, which peers read to test this engine.
    """

    def __init__(self, engine: Engine, *, count: int = SLOTS) -> None:
        self.engine = engine
        self._stride = HEAD_BYTES + SLOT_BYTES
        # A shared mapping: copy-on-write after fork() would detach the parent's pages from the RDMA device.
        self._region = mmap.mmap(-1, (count + 1) * self._stride)  # with the trial slot
        self._address = address_of(self._region)
        memory = np.frombuffer(self._region, np.uint8)
        starts = range(0, len(memory), self._stride)
        all_slots = [Slot(memory[start : start + self._stride], self._address + start) for start in starts]
        self._trial_slot, *free = all_slots
        self._free = deque(free)
        self._returned: list[Slot] = []
        self._lock = threading.Lock()
        # A tag is this random prefix and the number of the payload in 8 bytes.
        self._tag_prefix = secrets.token_bytes(TAG_BYTES - 8)
        self._tag_numbers = itertools.count(1)
        try:
            engine.register(self._address, len(self._region))
        except EngineError:
            engine.close()
            raise

    def take(self) -> Slot | None:
        """Return a slot to fill or to read into; None if all slots are in use."""
        with self._lock:
            self._reuse_returned()
            slot = self._free.popleft() if self._free else None
        if slot is not None:
            slot.tag = bytes(TAG_BYTES)  # invalidates reads of the slot's previous payload
        return slot

    def give(self, slot: Slot) -> None:
        """Release a slot. A slot with a transfer in flight is not reused before the transfer ends."""
        with self._lock:
            self._returned.append(slot)
            self._reuse_returned()

    def _reuse_returned(self) -> None:
        """Make returned slots free when their transfer has ended and their rest is over. The caller holds the lock."""
        now = time.monotonic()
        returned, self._returned = self._returned, []
        for slot in returned:
            if self._transfer_outcome(slot) is not None and slot.rests_until <= now:
                self._free.append(slot)
            else:
                self._returned.append(slot)

    def offer(self, slot: Slot, nbytes: int) -> pb.Memory:
        """Return the description by which a peer fetches the payload that is, or will be, in the slot."""
        slot.tag = self._tag_prefix + next(self._tag_numbers).to_bytes(8, "big")
        return self._memory(slot, nbytes)

    def trial(self) -> pb.Memory:
        """Return the description of memory that a peer fetches to test whether this engine is reachable."""
        return self._memory(self._trial_slot, nbytes=0)

    def _memory(self, slot: Slot, nbytes: int) -> pb.Memory:
        address = slot.address + HEAD_BYTES - TAG_BYTES
        return pb.Memory(engine=self.engine.address, address=address, size=nbytes, tag=slot.tag)

    def try_peer(self, source: pb.Memory, until: float) -> bool:
        """Return whether a peer's tag could be read before `until`. The first contact may block for a minute anyway."""
        # A slot of its own, for its transfer; its memory is that of the trial slot.
        slot = Slot(self._trial_slot.memory, self._trial_slot.address)
        try:
            self._begin(slot, source.engine, source.address, nbytes=0)  # the tag only
        except EngineError:
            return False
        while (succeeded := self._transfer_outcome(slot)) is None and time.monotonic() < until:
            time.sleep(_PAUSES_S[-1])
        if succeeded is None:
            with self._lock:
                # Tracked until its transfer ends. It never becomes free, because its memory is that of `_trial_slot`.
                self._returned.append(slot)
                slot.rests_until = float("inf")
        return bool(succeeded)

    def begin(self, slot: Slot, source: pb.Memory) -> None:
        """Start to fetch a payload from a peer that was reached before. Raises EngineError if the payload is too large
        or the engine rejects the transfer."""
        if len(source.tag) != TAG_BYTES or source.size > SLOT_BYTES:
            raise EngineError(f"invalid payload description: {source.size:,} bytes, at most {SLOT_BYTES:,} allowed")
        self._begin(slot, source.engine, source.address, source.size)

    def _begin(self, slot: Slot, engine: str, address: int, nbytes: int) -> None:
        """Start to read the tag and `nbytes` of payload at `address` of the peer's engine."""
        local = slot.address + HEAD_BYTES - TAG_BYTES
        slot.transfer = self.engine.begin(engine, local, address, TAG_BYTES + nbytes)

    def fetched(self, slot: Slot, source: pb.Memory) -> bool | None:
        """Return whether the payload has arrived intact; None while the transfer is in flight."""
        succeeded = self._transfer_outcome(slot)
        if succeeded is None:
            return None
        return succeeded and slot.tag == source.tag

    def _transfer_outcome(self, slot: Slot) -> bool | None:
        """Return None while the slot's transfer is in flight, and then, once, whether it has succeeded. Afterwards, and
        without a transfer, return True."""
        if slot.transfer is None:
            return True
        status = self.engine.status(slot.transfer)
        if status == PENDING:
            return None
        slot.transfer = None
        if status != DONE:
            slot.rests_until = max(slot.rests_until, time.monotonic() + REST_S)
        return status == DONE

    def close(self, *, trying: bool) -> None:
        """Unregister the memory and close the engine. Blocks for up to CLOSE_S until abandoned transfers end. If one is
        still in flight, or a trial is running (`trying`), keep memory and engine until this process ends, and log a
        warning."""
        self.engine.unregister(self._address)
        until = time.monotonic() + CLOSE_S
        while (in_flight := self._count_in_flight()) and time.monotonic() < until:
            time.sleep(_PAUSES_S[-1])
        unfinished = in_flight + int(trying)  # a trial is a transfer, too
        if unfinished:
            log.warning("%d transfers did not end; their memory is kept until this process ends", unfinished)
            make_immortal(self._region)
        self.engine.close(reusable=not unfinished)

    def _count_in_flight(self) -> int:
        with self._lock:
            self._reuse_returned()
            return sum(slot.transfer is not None for slot in self._returned)


def pause_s(since: float) -> float:
    """Return the poll interval for a transfer that began at `since`; the engine has no completion event."""
    age_s = time.monotonic() - since
    if age_s < 0.002:
        return _PAUSES_S[0]
    return _PAUSES_S[1] if age_s < 0.02 else _PAUSES_S[2]
