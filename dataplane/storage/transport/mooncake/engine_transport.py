"""Payloads fetched by Mooncake's transfer engine, one-sided, over RDMA or TCP. Both halves.

Nobody ever writes into another's memory. Of a put the unit fetches the payload from a slot of the client's into one of
its own; its one thread then admits the request again and copies it into the arena. Of a get the unit copies the rows
into a slot of its own; the client fetches from there, and believes the bytes once the unit has answered its Settle.

Why through slots, a copy more at either end, and not from arena to tensor:

- A transfer that was given up may go on landing, and a device does not ask whether a session is fenced. In a slot that
  does no harm: what lands there late reaches the arena only through the thread that refuses fenced sessions and stopped
  puts. So a fence, and the stop of a put, wait for no transfer.
- Registered memory is open to whoever reaches the engine. Of the arena nothing is, nor of a user's tensors.
- An arena grows, and gives memory back to the machine; pages that a device has locked do neither.

Why the client fetches what it reads, and the unit does not push: a client that gives up may use its memory again at
once, for nobody writes there but itself. What its own engine may still write to, a slot, it keeps until that is over.

Why a Settle: only the unit knows whether the slot held that payload all the time, and the session was not fenced, nor
the unit another epoch's. It refuses a Settle as it would refuse the read.

A client reuses its slot as soon as its call has failed, though the unit may fetch from there later. Those bytes belong
to a put that has failed: its space is nobody else's before the unit has confirmed to stop it, and is not read.

Whatever the engine cannot do goes in frames: small payloads, those that find no slot, peers that it does not reach,
transfers that fail. That costs time, never a call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import zmq

from dataplane.config import DataPlaneConfig
from dataplane.core.addresses import own_address, reachable_host, resolve_host, split_address
from dataplane.errors import ClientClosedError
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.connection import Wire, WireLostError
from dataplane.storage.transport.interface import ArrivedPayload, ClientPayloads, Fill, Offer, SentPayload
from dataplane.storage.transport.mooncake.engine import Engine, EngineError, EngineSettings
from dataplane.storage.transport.mooncake.peers import Contacts
from dataplane.storage.transport.mooncake.slots import CLOSE_S, SLOT_BYTES, SLOTS, Slot, Slots, pause_s
from dataplane.storage.transport.request_chunks import SMALL_BYTES, Bytes, WriteChunk
from dataplane.storage.transport.zmq import ClientFrames, scatter

log = logging.getLogger(__name__)

FROM_BYTES = SMALL_BYTES
"""Smaller payloads take less time in a frame, at any speed of the engine: one round trip instead of two or three."""
FETCH_S = 10.0
"""A payload that was not fetched within this time is asked for in frames; less than any call waits for."""
PAUSE_S = 1.0
"""A client whose payload the unit could not fetch sends frames for so long."""
PEER_TRANSFERS = 2
"""Of one client at a time: one that stopped cannot take all slots of a unit with it."""
MOST_OFFERS = SLOTS // 2
OFFER_S = 60.0
"""What a client did not settle for so long is taken back when it is needed."""
MOST_JOBS = 1024


class EngineTransport:
    """A client's engine, made when a unit first has one to offer. Thread-safe."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._contacts: Contacts | None = None
        self._slots: Slots | None = None
        self._is_out = config.bulk_transport != "mooncake"

    def to(self, unit: pb.Memory, endpoint: str, *, closing: Callable[[], bool]) -> ClientPayloads:
        """For the connection to a unit that answers at `endpoint` and has `unit`, memory to try its engine by; frames
        where there is no engine here, with a warning in the log. closing: whether the connection's calls are to end."""
        with self._lock:
            if self._slots is None and not self._is_out:
                self._open(endpoint)
            if self._slots is None or self._contacts is None:
                return ClientFrames()
            payloads = ClientEngine(self._slots, self._contacts, unit, closing=closing)
            self._contacts.ready(unit)
            return payloads

    def _open(self, endpoint: str) -> None:
        config = self._config
        try:
            self._slots = open_slots(config, config.mooncake_host or _host_towards(endpoint))
            self._contacts = Contacts(self._slots)
        except EngineError as error:
            log.warning("bulk_transport is mooncake, but rows travel by ZMQ: %s", error)
            self._is_out = True

    def close(self) -> None:
        """When no connection uses it any more. Idempotent."""
        with self._lock:
            slots, contacts = self._slots, self._contacts
            self._slots, self._contacts, self._is_out = None, None, True
        if slots is not None and contacts is not None:
            slots.close(trying=not contacts.close(CLOSE_S))


def open_slots(config: DataPlaneConfig, host: str) -> Slots:
    """An engine that peers call `host`, with its memory. EngineError."""
    settings = EngineSettings(host=host, protocol=config.mooncake_protocol, device=config.mooncake_device)
    return Slots(Engine(settings))


def _host_towards(endpoint: str) -> str:
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    host, _ = split_address(endpoint.removeprefix("tcp://"))
    return own_address(resolve_host(host))


class ClientEngine:
    """The client's half."""

    def __init__(self, slots: Slots, contacts: Contacts, unit: pb.Memory, *, closing: Callable[[], bool]) -> None:
        self._slots = slots
        self._contacts = contacts
        self._unit = unit
        self._closing = closing
        self._frames = ClientFrames()
        self._paused_until = 0.0

    def send(
        self, wire: Wire, header: pb.BulkRequest, chunk: WriteChunk, *, held: list[zmq.MessageTracker]
    ) -> SentPayload:
        """Copied into a slot, where the unit fetches it."""
        slot = self._slots.take() if self._usable(chunk.nbytes) else None
        if slot is None:
            return self._frames.send(wire, header, chunk, held=held)
        try:
            at, target = 0, slot.payload(chunk.nbytes).data
            for piece in chunk.frames:
                target[at : at + len(piece)] = piece
                at += len(piece)
            header.write.source.CopyFrom(self._slots.offer(slot, chunk.nbytes))
            wire.send(header, held=held)
        except BaseException:
            self._slots.give(slot)
            raise
        return SentPayload(call=header.call, chunk=chunk, done=partial(self._slots.give, slot))

    def not_fetched(self, why: str) -> None:
        """Frames for a while."""
        now = time.monotonic()
        if now >= self._paused_until:
            log.info("a storage unit could not fetch rows from here, they go by ZMQ for %.0f s: %s", PAUSE_S, why)
        self._paused_until = now + PAUSE_S

    def _usable(self, nbytes: int) -> bool:
        is_fit = FROM_BYTES <= nbytes <= SLOT_BYTES and time.monotonic() >= self._paused_until
        return is_fit and self._contacts.ready(self._unit)

    def ask(self, request: pb.ReadRanges, nbytes: int) -> None:
        """To be fetched, if the unit has a slot for it."""
        request.fetch = self._usable(nbytes)

    def receive(self, wire: Wire, reply: pb.BulkReply, nbytes: int) -> ArrivedPayload:
        """Fetched into a slot, in FETCH_S at most; ClientClosedError if the connection is closed meanwhile."""
        if not reply.bytes.HasField("source"):
            return self._frames.receive(wire, reply, nbytes)
        source = reply.bytes.source
        if source.size != nbytes:
            raise WireLostError(f"its payload has {source.size} bytes where {nbytes} were asked for")
        settle = pb.Settle(tag=source.tag)
        slot = self._slots.take()
        if slot is None:
            return ArrivedPayload(data=None, settle=settle)
        done = partial(self._slots.give, slot)
        try:
            is_there = self._fetch(slot, source)
        except BaseException:
            done()
            raise
        return ArrivedPayload(data=slot.payload(nbytes) if is_there else None, settle=settle, done=done)

    def _fetch(self, slot: Slot, source: pb.Memory) -> bool:
        since = time.monotonic()
        try:
            self._slots.begin(slot, source)
            while (is_there := self._slots.fetched(slot, source)) is None:
                if self._closing():
                    raise ClientClosedError
                if time.monotonic() > since + FETCH_S:
                    raise EngineError(f"not within {FETCH_S:.0f} s")
                time.sleep(pause_s(since))
            if not is_there:
                raise EngineError("the transfer failed, or brought something else")
        except EngineError as error:
            log.warning("rows could not be fetched from %s, they are asked for by ZMQ: %s", source.engine, error)
            self._contacts.failed(self._unit.engine)
            return False
        return True


@dataclass(eq=False)
class _Job:
    """A payload to fetch. slot: where to, once that has begun; failed: why it will not be."""

    source: pb.Memory
    later: Callable[[Fill | str], None]
    since: float
    slot: Slot | None = None
    failed: str = ""


@dataclass(frozen=True)
class _Offered:
    slot: Slot
    session: int
    since: float


class UnitEngine:
    """The unit's half. `trial`: memory by which clients try whether they reach this unit's engine."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._contacts = Contacts(slots)
        self._jobs: deque[_Job] = deque()
        self._offered: dict[bytes, _Offered] = {}
        self.trial = slots.trial()

    @classmethod
    def open(cls, config: DataPlaneConfig) -> UnitEngine | None:
        """None if the settings want none, or, with a warning in the log, if it cannot be had."""
        if config.bulk_transport != "mooncake":
            return None
        try:
            slots = open_slots(config, config.mooncake_host or reachable_host(config.host))
        except EngineError as error:
            log.warning("bulk_transport is mooncake, but this storage unit moves rows by ZMQ: %s", error)
            return None
        log.warning(
            "rows of this storage unit travel unencrypted by transfer engine (%s); who reaches %s or the ports of its "
            "transfers, open on every interface, can see and change them: see docs/transports.md",
            config.mooncake_protocol,
            slots.engine.address,
        )
        return cls(slots)

    def collect(self, write: pb.WriteRanges, later: Callable[[Fill | str], None]) -> Fill | None:
        """Fetched from the client, in FETCH_S at most."""
        job = _Job(write.source, later, time.monotonic())
        if len(self._jobs) >= MOST_JOBS:
            job.failed = "too many payloads are to be fetched"
        elif not self._contacts.ready(write.source):
            job.failed = f"its engine at {write.source.engine} was not reached so far"
        self._jobs.append(job)
        return None

    def step(self) -> float | None:
        """Finish, give up and begin transfers."""
        going_on: deque[_Job] = deque()
        busy: dict[str, int] = {}
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if self._is_over(job) or not self._goes_on(job, busy):
                self._end(job)
            else:
                going_on.append(job)
                busy[job.source.engine] = busy.get(job.source.engine, 0) + (job.slot is not None)
        self._jobs = going_on + self._jobs
        return pause_s(self._jobs[0].since) if self._jobs else None

    def _is_over(self, job: _Job) -> bool:
        """Whether it was fetched, or is known to fail."""
        if job.slot is None or job.failed:
            return bool(job.failed)
        is_there = self._slots.fetched(job.slot, job.source)
        if is_there is False:
            job.failed = "the transfer failed, or brought something else"
            self._contacts.failed(job.source.engine)
        return is_there is not None

    def _goes_on(self, job: _Job, busy: dict[str, int]) -> bool:
        """Begin it if it can be now; False if that failed, or it takes too long."""
        if time.monotonic() > job.since + FETCH_S:
            job.failed = f"not within {FETCH_S:.0f} s"
            if job.slot is not None:
                self._contacts.failed(job.source.engine)
        elif job.slot is None and busy.get(job.source.engine, 0) < PEER_TRANSFERS:
            job.slot = self._slots.take()
            try:
                if job.slot is not None:
                    self._slots.begin(job.slot, job.source)
            except EngineError as error:
                job.failed = str(error)
        return not job.failed

    def _end(self, job: _Job) -> None:
        slot, nbytes = job.slot, job.source.size
        if job.failed or slot is None:
            job.later(job.failed)
        else:
            job.later(partial(_fill, slot.payload(nbytes)))
        if slot is not None:
            self._slots.give(slot)

    def offer(self, session: int, nbytes: int) -> Offer | None:
        """A slot, while there are some for this."""
        if not FROM_BYTES <= nbytes <= SLOT_BYTES:
            return None
        if len(self._offered) >= MOST_OFFERS:
            self._take_back(lambda offered: offered.since + OFFER_S < time.monotonic())
        slot = self._slots.take() if len(self._offered) < MOST_OFFERS else None
        if slot is None:
            return None
        source = self._slots.offer(slot, nbytes)
        self._offered[source.tag] = _Offered(slot, session, time.monotonic())
        return Offer(data=slot.payload(nbytes), source=source)

    def _take_back(self, wanted: Callable[[_Offered], bool]) -> None:
        for tag, offered in list(self._offered.items()):
            if wanted(offered):
                del self._offered[tag]
                self._slots.give(offered.slot)

    def settle(self, session: int, tag: bytes) -> bool:
        """The slot is free; it has held the payload until now, if it is found."""
        offered = self._offered.get(tag)
        if offered is None or offered.session != session:
            return False
        del self._offered[tag]
        self._slots.give(offered.slot)
        return True

    def forget(self, session: int) -> None:
        """Its payloads under way need nothing: they are refused when they are there."""
        self._take_back(lambda offered: offered.session == session)

    def close(self) -> None:
        """Fetch nothing any more; jobs are not answered, as no request is."""
        for job in self._jobs:
            if job.slot is not None:
                self._slots.give(job.slot)
        self._jobs.clear()
        self._slots.close(trying=not self._contacts.close(CLOSE_S))


def _fill(payload: Bytes, arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
    scatter(arena, payload.data, offsets, sizes)
