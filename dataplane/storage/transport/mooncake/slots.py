"""Memory that payloads pass through on their way by transfer engine: the only memory that is ever registered.

A payload lies in a slot of its sender, behind a tag that no other payload has; the receiver's engine reads tag and
payload together into a slot of its own. Whoever reads from a slot that has another payload by now, or from another
process that came to the same address, finds another tag.
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
"""Payload that a slot takes."""
SLOTS = 16
"""Of each client and each storage unit: with the 64 MiB of these a transfer is never longer than one request's."""
TAG_BYTES = 16
HEAD_BYTES = 64
"""The payload begins at a cache line; the tag lies just before it."""
REST_S = 60.0
"""A slot whose transfer failed is not used for so long, lest some part of it is still on its way."""
CLOSE_S = 5.0
_PAUSES_S = (0.00005, 0.0002, 0.001)


@dataclass(eq=False)
class Slot:
    """Its holder's alone, from `take` to `give`."""

    memory: Bytes
    address: int
    transfer: int | None = field(default=None)
    rests_until: float = field(default=0.0)

    def payload(self, nbytes: int) -> Bytes:
        """The first bytes of the payload, not copied."""
        return self.memory[HEAD_BYTES : HEAD_BYTES + nbytes]

    @property
    def tag(self) -> bytes:
        return self.memory[HEAD_BYTES - TAG_BYTES : HEAD_BYTES].tobytes()

    @tag.setter
    def tag(self, tag: bytes) -> None:
        self.memory[HEAD_BYTES - TAG_BYTES : HEAD_BYTES] = np.frombuffer(tag, np.uint8)


class Slots:
    """The slots of one engine, which they own. Thread-safe. EngineError where the memory cannot be registered."""

    def __init__(self, engine: Engine, *, count: int = SLOTS) -> None:
        self.engine = engine
        self._stride = HEAD_BYTES + SLOT_BYTES
        # Shared, so that a forked child's writes elsewhere never move the parent's pages away from a device.
        self._region = mmap.mmap(-1, (count + 1) * self._stride)
        self._address = address_of(self._region)
        memory = np.frombuffer(self._region, np.uint8)
        made = [Slot(memory[at : at + self._stride], self._address + at) for at in range(0, len(memory), self._stride)]
        self._trials, *free = made
        self._free = deque(free)
        self._left: list[Slot] = []
        self._lock = threading.Lock()
        self._first = secrets.token_bytes(TAG_BYTES - 8)
        self._numbers = itertools.count(1)
        try:
            engine.register(self._address, len(self._region))
        except EngineError:
            engine.close()
            raise

    def take(self) -> Slot | None:
        """A slot to fill or to read into; None while all are in use."""
        with self._lock:
            self._collect()
            slot = self._free.popleft() if self._free else None
        if slot is not None:
            slot.tag = bytes(TAG_BYTES)  # of a payload that was here before: whoever still reads it, reads no more
        return slot

    def give(self, slot: Slot) -> None:
        """Nobody needs it any more. One with a transfer under way is not handed out before that is over."""
        with self._lock:
            self._left.append(slot)
            self._collect()

    def _collect(self) -> None:
        now = time.monotonic()
        left, self._left = self._left, []
        for slot in left:
            if self._over(slot) is not None and slot.rests_until <= now:
                self._free.append(slot)
            else:
                self._left.append(slot)

    def offer(self, slot: Slot, nbytes: int) -> pb.Memory:
        """What a peer needs to fetch the payload that is, or will be, in the slot."""
        slot.tag = self._first + next(self._numbers).to_bytes(8, "big")
        return self._memory(slot, nbytes)

    def trial(self) -> pb.Memory:
        """What a peer may fetch to find out whether it can."""
        return self._memory(self._trials, 0)

    def _memory(self, slot: Slot, nbytes: int) -> pb.Memory:
        address = slot.address + HEAD_BYTES - TAG_BYTES
        return pb.Memory(engine=self.engine.address, address=address, size=nbytes, tag=slot.tag)

    def try_peer(self, source: pb.Memory, until: float) -> bool:
        """Whether a peer's tag can be read. Blocks until `until`, at first contact for a minute at worst."""
        slot = Slot(self._trials.memory, self._trials.address)
        try:
            self._begin(slot, source.engine, source.address, 0)
        except EngineError:
            return False
        while (over := self._over(slot)) is None and time.monotonic() < until:
            time.sleep(_PAUSES_S[-1])
        if over is None:
            with self._lock:
                self._left.append(slot)  # to be looked after, and never free: it is no slot of its own
                slot.rests_until = float("inf")
        return bool(over)

    def begin(self, slot: Slot, source: pb.Memory) -> None:
        """Begin to fetch a payload from a peer that was reached before. EngineError if it is too large, or refused."""
        if len(source.tag) != TAG_BYTES or source.size > SLOT_BYTES:
            raise EngineError(f"its memory of {source.size:,} bytes is not as a slot's, of {SLOT_BYTES:,} at most")
        self._begin(slot, source.engine, source.address, source.size)

    def _begin(self, slot: Slot, engine: str, address: int, nbytes: int) -> None:
        local = slot.address + HEAD_BYTES - TAG_BYTES
        slot.transfer = self.engine.begin(engine, local, address, TAG_BYTES + nbytes)

    def fetched(self, slot: Slot, source: pb.Memory) -> bool | None:
        """Whether the payload is there; None while it is on its way."""
        over = self._over(slot)
        return over if over is None else over and slot.tag == source.tag

    def _over(self, slot: Slot) -> bool | None:
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
        """Nobody reaches the memory any more. Waits up to CLOSE_S for transfers that were given up; should one still be
        under way, or a peer be tried (`trying`), memory and engine are left until this process ends, with a warning."""
        self.engine.unregister(self._address)
        until = time.monotonic() + CLOSE_S
        while (in_flight := self._in_flight()) and time.monotonic() < until:
            time.sleep(_PAUSES_S[-1])
        left = in_flight + trying
        if left:
            log.warning("%d transfers do not end: what they could touch is kept until this process ends", left)
            make_immortal(self._region)
        self.engine.close(reusable=not left)

    def _in_flight(self) -> int:
        with self._lock:
            self._collect()
            return sum(slot.transfer is not None for slot in self._left)


def pause_s(since: float) -> float:
    """How long to wait before looking again after a transfer that began at `since`. The engine wakes nobody."""
    age_s = time.monotonic() - since
    return _PAUSES_S[0] if age_s < 0.002 else _PAUSES_S[1] if age_s < 0.02 else _PAUSES_S[2]
