"""Payloads fetched by Mooncake's transfer engine, one-sided, over RDMA or TCP. Client half and unit half.

No process writes into the memory of another. For a put, the unit fetches the payload from a slot of the client into a
slot of the unit; the unit's thread then admits the request again and copies the payload into the arena. For a get, the
unit copies the rows into one of its slots; the client fetches them and accepts the bytes after the reply to its Settle.

Slots cost an additional copy at each end, compared with a transfer from arena to tensor. The reasons for them:

- An abandoned transfer may continue to write, and an RDMA device does not check whether a session is fenced. A late
  write into a slot is harmless, because slots reach the arena only through the thread that rejects fenced sessions and
  aborted puts. A fence, or the abort of a put, therefore waits for no transfer.
- Any process that reaches the engine can access registered memory. The arena and users' tensors are never registered.
- An arena grows and returns memory to the machine; pages locked by a device could do neither.

The client fetches its reads, and the unit does not push, so that a client can reuse its memory as soon as its call has
failed: no other process writes there. A slot to which its own engine may still write is kept until the transfer ends.

A Settle is necessary because only the unit can confirm that the slot held the payload throughout, that the session was
not fenced and that the unit's epoch is the same. The unit rejects a Settle for the same reasons as the read.

A client reuses its slot as soon as its call has failed, although the unit may still fetch from it. Those bytes belong
to a failed put: its space is not read, and not reused before the unit has confirmed the abort.

Everything else is sent in frames: small payloads, payloads without a free slot, payloads of unreachable peers, and
failed transfers. The fallback costs time, but never fails a call.
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
"""Smaller payloads are sent in frames, which take one round trip instead of two or three."""
FETCH_S = 10.0
"""Timeout of a fetch, after which the payload is sent in frames; shorter than the timeout of any call."""
PAUSE_S = 1.0
"""Time for which a client sends frames after the unit could not fetch its payload."""
PEER_TRANSFERS = 2
"""Maximum concurrent transfers from one client, so that a stopped client cannot occupy all slots of a unit."""
MOST_OFFERS = SLOTS // 2  # of a unit; its other slots remain for fetches
OFFER_S = 60.0
"""Time after which the unit may reclaim a slot that the client has not settled."""
MOST_JOBS = 1024  # fetches of a unit, queued or in flight
_NOT_FETCHED = (
    "the transfer failed, or the sender reused the slot before it was read (harmless if rare; if it repeats, check the "
    "RDMA network)"
)


class EngineTransport:
    """A client's engine, created when the first unit with an engine connects. Thread-safe.

    `_slots`, `_contacts`: None before that and after `close`. `_is_disabled`: only frames are used, because the
    engine is not configured, could not be created or is closed.
    """

    def __init__(self, config: DataPlaneConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._contacts: Contacts | None = None
        self._slots: Slots | None = None
        self._is_disabled = config.bulk_transport != "mooncake"

    def payloads_for(self, unit: pb.Memory, endpoint: str, *, closing: Callable[[], bool]) -> ClientPayloads:
        """Return the client half for the connection to the unit at `endpoint`. unit: memory to fetch in order to test
        the unit's engine. Without an engine here, return `ClientFrames`. closing: returns whether the connection is
        closing."""
        with self._lock:
            if self._slots is None and not self._is_disabled:
                self._open(endpoint)
            if self._slots is None or self._contacts is None:
                return ClientFrames()
            payloads = ClientEngine(self._slots, self._contacts, unit, closing=closing)
            self._contacts.ready(unit)  # starts to test the unit's engine
            return payloads

    def _open(self, endpoint: str) -> None:
        """Create the engine and its slots. On failure log a warning and use frames from now on."""
        config = self._config
        try:
            self._slots = open_slots(config, config.mooncake_host or _own_host_for(endpoint))
            self._contacts = Contacts(self._slots)
        except EngineError as error:
            log.warning("Client falls back to ZMQ although bulk_transport is mooncake: %s", error)
            self._is_disabled = True

    def close(self) -> None:
        """Release the engine. Call it after the last connection is closed. Idempotent."""
        with self._lock:
            slots = self._slots
            contacts = self._contacts
            self._slots = None
            self._contacts = None
            self._is_disabled = True
        if slots is not None and contacts is not None:
            slots.close(trying=not contacts.close(CLOSE_S))  # a trial may still use the engine


def open_slots(config: DataPlaneConfig, host: str) -> Slots:
    """Open an engine with the address `host` for peers, and its slots. Raises EngineError."""
    settings = EngineSettings(host=host, protocol=config.mooncake_protocol, device=config.mooncake_device)
    return Slots(Engine(settings))


def _own_host_for(endpoint: str) -> str:
    """Return the address of this host that the unit at `endpoint` can reach."""
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    host, _ = split_address(endpoint.removeprefix("tcp://"))
    return own_address(resolve_host(host))


class ClientEngine:
    """The client half, for the connection to one unit. unit: memory to fetch to test the unit's engine. closing:
    returns whether the connection is closing. `_paused_until`: payloads are sent in frames until this time."""

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
        """Copy the payload into a slot, from which the unit fetches it. If the engine is unusable, or all slots are in
        use, send frames."""
        slot = self._slots.take() if self._usable(chunk.nbytes) else None
        if slot is None:
            return self._frames.send(wire, header, chunk, held=held)
        try:
            position = 0
            target = slot.payload(chunk.nbytes).data
            for piece in chunk.frames:
                target[position : position + len(piece)] = piece
                position += len(piece)
            header.write.source.CopyFrom(self._slots.offer(slot, chunk.nbytes))
            wire.send(header, held=held)
        except BaseException:
            self._slots.give(slot)
            raise
        return SentPayload(call=header.call, chunk=chunk, done=partial(self._slots.give, slot))

    def not_fetched(self, why: str) -> None:
        """Send payloads in frames for the next `PAUSE_S`."""
        now = time.monotonic()
        if now >= self._paused_until:
            log.info("Storage unit could not fetch rows; this client uses ZMQ for %.0f s: %s", PAUSE_S, why)
        self._paused_until = now + PAUSE_S

    def _usable(self, nbytes: int) -> bool:
        """Whether to use the engine for a payload of `nbytes`. Starts to test the unit's engine if necessary."""
        is_fit = FROM_BYTES <= nbytes <= SLOT_BYTES and time.monotonic() >= self._paused_until
        return is_fit and self._contacts.ready(self._unit)

    def set_fetch(self, request: pb.ReadRanges, nbytes: int) -> None:
        """Request a payload to fetch, if the engine is usable; the unit uses a frame if it has no free slot."""
        request.fetch = self._usable(nbytes)

    def receive(self, wire: Wire, reply: pb.BulkReply, nbytes: int) -> ArrivedPayload:
        """Fetch the payload into a slot, within FETCH_S, unless the unit has sent a frame. Without a free slot, and if
        the fetch fails, the result has no data. Raises ClientClosedError if the connection is closed meanwhile."""
        if not reply.bytes.HasField("source"):
            return self._frames.receive(wire, reply, nbytes)
        source = reply.bytes.source
        if source.size != nbytes:
            raise WireLostError(f"the reply has a payload of {source.size:,} bytes, expected {nbytes:,} bytes")
        settle = pb.Settle(tag=source.tag)
        slot = self._slots.take()
        if slot is None:  # all are in use; the Settle releases the slot of the unit
            return ArrivedPayload(data=None, settle=settle)
        done = partial(self._slots.give, slot)
        try:
            has_arrived = self._fetch(slot, source)
        except BaseException:
            done()
            raise
        return ArrivedPayload(data=slot.payload(nbytes) if has_arrived else None, settle=settle, done=done)

    def _fetch(self, slot: Slot, source: pb.Memory) -> bool:
        """Fetch a payload into the slot. On failure log it, mark the unit's engine as unreachable and return False."""
        since = time.monotonic()
        try:
            self._slots.begin(slot, source)
            while (has_arrived := self._slots.fetched(slot, source)) is None:
                if self._closing():
                    raise ClientClosedError
                if time.monotonic() > since + FETCH_S:
                    raise EngineError(f"the fetch did not complete within {FETCH_S:.0f} s")
                time.sleep(pause_s(since))
            if not has_arrived:
                raise EngineError(_NOT_FETCHED)
        except EngineError as error:
            log.warning("Fetch of rows from %s failed; retrying by ZMQ: %s", source.engine, error)
            self._contacts.failed(self._unit.engine)
            return False
        return True


@dataclass(eq=False)
class _Job:
    """A payload to fetch from a client. on_fetched: called with the result (see `UnitPayloads.collect`). since: when
    the job was created. slot: the target, once the transfer has begun. failed: the reason of a failure."""

    source: pb.Memory
    on_fetched: Callable[[Fill | str], None]
    since: float
    slot: Slot | None = None
    failed: str = ""


@dataclass(frozen=True)
class _Offered:
    """A slot that holds a payload for a session, until the session settles it. since: the time of the offer."""

    slot: Slot
    session: int
    since: float


class UnitEngine:
    """The unit half, used by the thread of the bulk server. `trial`: memory that clients fetch to test whether this
    unit's engine is reachable. `_jobs`: fetches without a result, oldest first. `_offered`: payloads that clients have
    not settled, by tag, oldest first."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._contacts = Contacts(slots)
        self._jobs: deque[_Job] = deque()
        self._offered: dict[bytes, _Offered] = {}
        self.trial = slots.trial()

    @classmethod
    def open(cls, config: DataPlaneConfig) -> UnitEngine | None:
        """Open the unit's engine. Return None if it is not configured. If it is unavailable, log a warning and return
        None."""
        if config.bulk_transport != "mooncake":
            return None
        try:
            slots = open_slots(config, config.mooncake_host or reachable_host(config.host))
        except EngineError as error:
            log.warning("Storage unit falls back to ZMQ although bulk_transport is mooncake: %s", error)
            return None
        log.warning(
            "Storage unit sends rows unencrypted by transfer engine (%s); any process that reaches %s or the ports of "
            "its transfers, open on every interface, can read and change them. See docs/transports.md",
            config.mooncake_protocol,
            slots.engine.address,
        )
        return cls(slots)

    def collect(self, write: pb.WriteRanges, on_fetched: Callable[[Fill | str], None]) -> Fill | None:
        """Queue a fetch of the payload from the client, with the timeout FETCH_S. `step` calls `on_fetched` with the
        result, also for a fetch that cannot begin. Always returns None."""
        job = _Job(write.source, on_fetched, time.monotonic())
        if len(self._jobs) >= MOST_JOBS:
            job.failed = "the unit's queue of fetches is full"
        elif not self._contacts.ready(write.source):
            job.failed = f"the client's engine at {write.source.engine} has not been reached yet"
        self._jobs.append(job)
        return None

    def step(self) -> float | None:
        """Finish, abandon and start transfers. Return the seconds until the next step, None if there is no job."""
        unfinished: deque[_Job] = deque()
        transfers: dict[str, int] = {}  # the id in flight, by the client's engine
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            if self._is_done(job) or not self._advance(job, transfers):
                self._finish(job)
            else:
                unfinished.append(job)
                transfers[job.source.engine] = transfers.get(job.source.engine, 0) + (job.slot is not None)
        self._jobs = unfinished + self._jobs  # `on_fetched` may have queued jobs
        return pause_s(self._jobs[0].since) if self._jobs else None

    def _is_done(self, job: _Job) -> bool:
        """Return whether the payload was fetched or its fetch has failed; `job.failed` is then the reason."""
        if job.failed:
            return True
        if job.slot is None:  # its transfer has not begun
            return False
        has_arrived = self._slots.fetched(job.slot, job.source)
        if has_arrived is False:
            job.failed = _NOT_FETCHED
            self._contacts.failed(job.source.engine)
        return has_arrived is not None

    def _advance(self, job: _Job, transfers: dict[str, int]) -> bool:
        """Start the transfer if a slot is free and fewer than PEER_TRANSFERS of the client are in flight. Return False
        if the job failed (`job.failed`), also by FETCH_S. transfers: the id in flight, by the client's engine."""
        if time.monotonic() > job.since + FETCH_S:
            job.failed = f"the fetch did not complete within {FETCH_S:.0f} s"
            if job.slot is not None:  # the transfer has begun, so its client does not respond
                self._contacts.failed(job.source.engine)
        elif job.slot is None and transfers.get(job.source.engine, 0) < PEER_TRANSFERS:
            job.slot = self._slots.take()  # None: the next step tries again
            try:
                if job.slot is not None:
                    self._slots.begin(job.slot, job.source)
            except EngineError as error:
                job.failed = str(error)
        return not job.failed

    def _finish(self, job: _Job) -> None:
        """Report the payload or the failure of a job, and release its slot."""
        slot = job.slot
        nbytes = job.source.size
        if job.failed or slot is None:  # a finished job without a slot has failed
            job.on_fetched(job.failed)
        else:
            job.on_fetched(partial(_fill, slot.payload(nbytes)))
        if slot is not None:
            self._slots.give(slot)

    def offer(self, session: int, nbytes: int) -> Offer | None:
        """Return a slot for a payload; None if the size does not fit, or no slot is free for another offer."""
        if not FROM_BYTES <= nbytes <= SLOT_BYTES:
            return None
        if len(self._offered) >= MOST_OFFERS:
            self._reclaim(lambda offered: offered.since + OFFER_S < time.monotonic())  # not settled in time
        slot = self._slots.take() if len(self._offered) < MOST_OFFERS else None
        if slot is None:
            return None
        source = self._slots.offer(slot, nbytes)
        self._offered[source.tag] = _Offered(slot, session, time.monotonic())
        return Offer(data=slot.payload(nbytes), source=source)

    def _reclaim(self, is_reclaimable: Callable[[_Offered], bool]) -> None:
        """Release the offered slots for which `is_reclaimable` returns true."""
        for tag, offered in list(self._offered.items()):  # a copy, because entries are removed
            if is_reclaimable(offered):
                del self._offered[tag]
                self._slots.give(offered.slot)

    def settle(self, session: int, tag: bytes) -> bool:
        """Release the slot of a payload. Return whether the slot still held the payload for this session."""
        offered = self._offered.get(tag)
        if offered is None or offered.session != session:
            return False
        del self._offered[tag]
        self._slots.give(offered.slot)
        return True

    def forget(self, session: int) -> None:
        """Reclaim the slots offered to a fenced session. Its writes in flight are rejected when they arrive."""
        self._reclaim(lambda offered: offered.session == session)

    def close(self) -> None:
        """Stop fetching and close the engine. Pending jobs get no reply."""
        for job in self._jobs:
            if job.slot is not None:
                self._slots.give(job.slot)
        self._jobs.clear()
        self._slots.close(trying=not self._contacts.close(CLOSE_S))


def _fill(payload: Bytes, arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
    scatter(arena, payload.data, offsets, sizes)
