"""The I/O thread of a worker's messages: its sockets, its timers (functions to call after some time), and what it
knows of the workers with which it exchanges messages."""

from __future__ import annotations

import collections
import contextlib
import enum
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from dataplane.core.addresses import join_address, resolve_host
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.zmq_io import bind_tcp, poll_ms, send
from dataplane.errors import InternalError
from workers.directory import DirectoryClient, DirectoryEntry, EntryState, Facts, Kind
from workers.directory.address import WorkerAddress
from workers.errors import MessengerClosedError, WorkerLostError
from workers.messages import wire
from workers.messages.collectives import Road
from workers.messages.deliveries import Posting
from workers.messages.incoming import Incoming
from workers.messages.outgoing import OutgoingMessages, Sending
from workers.messages.relays import Backlog, Relays
from workers.messages.shared_buffers import Mappings, Slabs
from workers.messages.snapshots import ValueSnapshot
from workers.messages.transfers import Collectives, TransferSource
from workers.messages.wire import Absent, Data, ForgetMessage, PostMessage, Pull, Relay, WantMessage
from workers.transport.encoding import encode, error_of
from workers.transport.links import LINGER_MS, Links
from workers.transport.pickling import Bytes
from workers.transport.poll_thread import PollThread
from workers.transport.zmq_sockets import Socket, frame, open_socket, poller, received

KEEP_BYTES = 1 << 30
"""Most memory of dropped tensors that is kept for the next received ones."""

_log = logging.getLogger(__name__)


class PeerState(enum.Enum):
    """What this worker knows of a peer. UNKNOWN: the next operation looks it up; LOOKUP: this waits for the directory's
    answer; ALIVE: the peer is registered, and the directory reports its end."""

    UNKNOWN = enum.auto()
    LOOKUP = enum.auto()
    ALIVE = enum.auto()


@dataclass
class Peer:
    """A worker with which messages are exchanged. incarnation: that of its latest message or directory entry."""

    state: PeerState = PeerState.UNKNOWN
    incarnation: int = 0
    endpoint: str = ""


class IoThread:
    """Runs until `close`. Any thread may call `submit_*`, `call`, `drop` and `settled`; the other methods are for its
    own thread.

    host: the address of this host for peers; its port is in the directory entry's endpoint. lookup_s: how long at
    least to wait for a peer's registration.

    A failed operation or message does not affect others. If the directory declares this worker lost, all pending
    operations fail with `WorkerLostError`, as they do at its peers; later operations run under the worker's new
    incarnation. If the thread fails, the worker leaves the directory, which notifies its peers.

    incarnation: of this worker, 0 between its loss and its new registration. `_calls`: functions to call in the thread;
    `_next_expiry`: the first deadline of an operation; `_until_registered`: functions to call once this worker is
    registered again; `_settle_futures`: those of `settled` that are not done; `_ended`: the error of all operations
    after the thread's end; `_expelled_error`: the reason to end if another process may have this worker's name.
    """

    def __init__(
        self,
        address: WorkerAddress,
        directory: DirectoryClient,
        slabs: Slabs,
        mappings: Mappings,
        backlog: Backlog,
        road: Road,
        *,
        host: str,
        facts: Facts,
        lookup_s: float,
    ) -> None:
        self.name = address.get_name()
        self._reader = f"worker {self.name}"
        self._directory = directory
        self._slabs = slabs
        self._mappings = mappings
        self._lookup_s = lookup_s
        self._peers: dict[str, Peer] = {}
        self._until_registered: list[Callable[[], None]] = []
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._timers = Timers()
        self._next_expiry = math.inf
        self._settle_futures: list[Future[None]] = []
        self._ended: Exception | None = None
        self._expelled_error: Exception | None = None
        self._pool = BufferPool(KEEP_BYTES)
        self.host = resolve_host(host)
        self.outgoing = OutgoingMessages(self.name, self._transmit, self._released)
        self._collectives = Collectives(self.host, road, lookup_s, call=self.call)
        self.transfers = TransferSource(self.name, self.outgoing, slabs, self._collectives, self._tell)
        self.incoming = Incoming(
            self.name,
            mappings,
            self._pool,
            Relays(backlog, self._reply, self._timers.schedule),
            self._collectives,
            reply=self._reply,
            ask_relay=self._ask_relay,
            schedule=self._timers.schedule,
            call=self.call,
            contact=self.outgoing.contact,
            forget=self.outgoing.forget,
            is_alive=lambda name: self._peer(name).state is PeerState.ALIVE,
        )
        self._context: zmq.Context[Socket] = zmq.Context()
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._router = open_socket(self._context, zmq.ROUTER, linger_ms=LINGER_MS)
            self._links = Links(self._context)
            name = f"tq-messages-{self.name}"
            sources = poller(self._router, self._links.socket)
            self._thread = PollThread(name, sources, self._run_once, self._thread_ended, timeout_ms=self._timeout_ms)
            undo.callback(self._thread.forget)
            self._unsubscribe = directory.subscribe(self._entry_changed)
            undo.callback(self._unsubscribe)
            port = bind_tcp(self._router, self.host)
            self.incarnation = directory.register_worker(address, join_address(self.host, port), facts).incarnation
            undo.pop_all()
        self._thread.start()

    # --- called from any thread -----------------------------------------------------------------------------------

    def call(self, work: Callable[[], None]) -> None:
        """Schedule `work` in the I/O thread, in the order of calls. After the thread's end the caller runs it."""
        self._calls.append(work)
        self._thread.wake()
        if self._ended is not None:  # the thread no longer runs them
            self._run_calls()

    def submit_send(self, sendings: list[Sending]) -> None:
        """Send messages; the future of each has its outcome."""
        self.call(partial(self._send_all, sendings))

    def submit_recv(self, posting: Posting) -> None:
        """Receive a message; the future of `posting` has it."""
        self.call(partial(self._receive, posting))

    def drop(self, posting: Posting) -> None:
        """Abandon a receive that lost its handle, or whose wait failed. Only enqueues, so a finalizer may call this."""
        if self._ended is None:
            self._calls.append(partial(self.incoming.abandon, posting))
            self._thread.wake()

    def settled(self) -> Future[None]:
        """Return a future that completes once receivers no longer need this worker for the messages it sent."""
        future: Future[None] = Future()

        def complete_or_keep() -> None:
            if self._ended is None:
                self._settle_futures.append(future)  # `_run_once` completes it, at once if nothing is kept
            else:
                future.set_result(None)

        self.call(complete_or_keep)
        return future

    def close(self) -> None:
        """End the thread and free its resources. Pending operations raise `MessengerClosedError`. Idempotent."""
        self._thread.close()
        self._unsubscribe()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run_once(self, _: object) -> None:
        """Handle all calls, messages and timers that are due, whatever the events of the poll are."""
        self._run_calls()
        self._receive_requests()
        self._receive_answers()
        self._run_timers()
        if self._settle_futures and self.outgoing.settled:
            self._complete_settled()

    def _thread_ended(self, defect: BaseException | None) -> None:
        """Fail everything that is pending, and free the resources. defect: the error that ended the thread, or None."""
        error: Exception = MessengerClosedError(worker=self.name)
        if defect is not None:
            _log.error("Worker %s: its message thread failed", self.name, exc_info=defect)
            error = InternalError(what=f"the message thread of worker {self.name} failed: {defect!r}")
            self._directory.ask_end(Kind.WORKER, self.name, self.incarnation, why=f"message thread failed: {defect!r}")
        self._ended = error = self._expelled_error or error  # from now on, callers of `call` run their own work
        self.outgoing.fail_all(error)
        self.incoming.fail_all(error)
        self._collectives.close()
        self._mappings.close()
        self._pool.drop()
        self._context.destroy(linger=LINGER_MS)
        self._run_calls()  # operations that were scheduled before the end fail
        self._complete_settled()

    def _complete_settled(self) -> None:
        for future in self._settle_futures:
            future.set_result(None)
        self._settle_futures.clear()

    def _run_calls(self) -> None:
        """Run the scheduled calls. After the thread's end, other threads that schedule calls run this, concurrently."""
        with contextlib.suppress(IndexError):  # no call is left
            while True:
                self._attempt(self._calls.popleft())

    def _attempt(self, work: Callable[[], None], what: str = "", fail: Callable[..., None] | None = None) -> None:
        """Call `work`. An exception does not affect other work: it is logged, and passed to `fail` as an error about
        `what`."""
        try:
            work()
        except Exception as defect:
            _log.exception("Worker %s: a message operation failed", self.name)
            if fail is not None:
                self._attempt(partial(fail, InternalError(what=f"{what}: {defect!r}")))

    def _timeout_ms(self) -> int | None:
        """Return the time until the next timer or deadline, None if there is neither."""
        next_time = min(self._next_expiry, self._timers.next_time)
        return None if next_time == math.inf else poll_ms(next_time - time.monotonic())

    def _run_timers(self) -> None:
        """Run the due timers, and fail the operations whose deadline passed."""
        now = time.monotonic()
        for work in self._timers.due(now):
            self._attempt(work)
        if self._next_expiry <= now:
            self._next_expiry = min(self.outgoing.expire(now), self.incoming.expire(now))

    # --- operations -----------------------------------------------------------------------------------------------

    def _send_all(self, sendings: list[Sending]) -> None:
        """Begin to send these messages. An exception at one fails all messages to and from its receiver."""
        for sending in sendings:
            if self._ended is not None:
                sending.fail(self._ended)
                sending.snapshot.release()
                continue
            self._attempt(partial(self._send, sending), sending.what, partial(self._fail_peer, sending.to))

    def _send(self, sending: Sending) -> None:
        """Queue a message. It is sent once the receiver's address is known."""
        self.outgoing.queue(sending)
        self.outgoing.contact(sending.to, sending.stream, sending.options)  # a new contact gets these options
        self._next_expiry = min(self._next_expiry, sending.deadline)
        self._contact_peer(sending.to, sending.deadline)

    def _receive(self, posting: Posting) -> None:
        """Begin a receive. An exception fails it."""
        if self._ended is not None:
            posting.fail(self._ended)
            return
        self._attempt(partial(self._post_receive, posting), posting.what, partial(self.incoming.give_up, posting))

    def _post_receive(self, posting: Posting) -> None:
        """Match a receive with an arrived message, or let it wait and look its source up."""
        self._next_expiry = min(self._next_expiry, posting.deadline)
        is_alive = self._peer(posting.source).state is PeerState.ALIVE
        if self.incoming.post(posting, is_alive):
            self._contact_peer(posting.source, posting.deadline)

    # --- peers ----------------------------------------------------------------------------------------------------

    def _peer(self, name: str) -> Peer:
        return self._peers.setdefault(name, Peer())

    def _contact_peer(self, name: str, deadline: float) -> None:
        """Look the peer up, so that its death is reported to this end, and then send the messages queued for it. Send
        them now if it is known; a no-op while it is looked up. deadline: of the operation; the lookup lasts until then,
        and at least `_lookup_s`."""
        peer = self._peer(name)
        if peer.state is PeerState.ALIVE:
            self.outgoing.flush(name, self.incarnation, peer.incarnation, peer.endpoint)
        elif peer.state is PeerState.UNKNOWN:
            wait_s = max(self._lookup_s, deadline - time.monotonic())
            lookup = self._directory.ask(Kind.WORKER, name, wait_s)
            peer.state = PeerState.LOOKUP
            lookup.add_done_callback(lambda future: self.call(partial(self._attempt_lookup, name, future)))

    def _attempt_lookup(self, name: str, future: Future[tuple[DirectoryEntry, ...]]) -> None:
        """Handle the directory's answer about a peer. An exception fails the messages to and from that peer."""
        found = f"{self.name} found {name}"
        self._attempt(partial(self._handle_lookup, name, future), found, partial(self._fail_peer, name))

    def _handle_lookup(self, name: str, future: Future[tuple[DirectoryEntry, ...]]) -> None:
        """Handle the directory's answer about a peer: send and match its messages, or fail them."""
        if self._ended is not None:
            return
        # This worker is not registered now, and messages need its incarnation: handle the answer later.
        if not self.incarnation:
            self._until_registered.append(partial(self._attempt_lookup, name, future))
            return
        peer = self._peer(name)
        error = future.exception()
        if isinstance(error, Exception):
            self._fail_peer(name, error)
            return
        (entry,) = future.result()
        self._record_incarnation(name, peer, entry.incarnation)
        peer.state = PeerState.ALIVE
        peer.endpoint = entry.endpoints[0]
        self.outgoing.flush(name, self.incarnation, entry.incarnation, peer.endpoint)
        self.incoming.match(name)

    def _entry_changed(self, entry: DirectoryEntry) -> None:
        """Schedule the handling of an entry: the directory client's thread calls this if a peer, whose entry was looked
        up, has ended, or if this worker's own entry has changed."""
        if entry.kind is Kind.WORKER:
            handle = self._own_entry_changed if entry.name == self.name else self._peer_lost
            self.call(partial(handle, entry))

    def _peer_lost(self, entry: DirectoryEntry) -> None:
        """Fail the messages of a peer that has ended, if this worker used that incarnation of it."""
        peer = self._peers.get(entry.name)
        if self._ended is None and peer is not None and peer.incarnation == entry.incarnation:
            self._fail_peer(entry.name, WorkerLostError(worker=entry.name, why=entry.why))

    def _own_entry_changed(self, entry: DirectoryEntry) -> None:
        """Handle a directory entry of this worker itself: it was declared lost, or registered again."""
        if self._ended is not None:
            return
        if entry.live:
            self.incarnation = entry.incarnation
            waiting, self._until_registered = self._until_registered, []
            for work in waiting:
                self._attempt(work)
            return
        error = WorkerLostError(worker=self.name, why=f"the job's directory gave it up: {entry.why}")
        # Lost again before a new registration: the registration failed, and the name may be another process's.
        if not self.incarnation:
            self._expelled_error = error
            self._thread.stop()
        elif self.incarnation == entry.incarnation and entry.state is EntryState.LOST:  # the client registers it again
            self.incarnation = 0
            for name, peer in self._peers.items():
                self._disconnect(name, peer)
            self.outgoing.fail_all(error)
            self.incoming.fail_all(error)

    def _record_incarnation(self, name: str, peer: Peer, incarnation: int) -> None:
        """Record the incarnation of a peer, and discard the state of an earlier one. A peer that was alive has been
        restarted: fail the messages to it."""
        if peer.incarnation == incarnation:
            return
        was_alive = peer.state is PeerState.ALIVE
        peer.incarnation = incarnation
        self.incoming.outdate(name, incarnation)
        if was_alive:
            self._disconnect(name, peer)
            self.outgoing.lose(name, WorkerLostError(worker=name, why="it was restarted"))
            if self.incoming.waits_for(name):
                self._contact_peer(name, 0.0)  # looks it up for at least `_lookup_s`

    def _disconnect(self, name: str, peer: Peer) -> None:
        """Close the connection to a peer. The next operation looks the peer up again."""
        peer.state = PeerState.UNKNOWN
        self._collectives.end_with(name)
        self._links.cut(name)

    def _fail_peer(self, name: str, error: Exception) -> None:
        """Close the connection to a peer, and fail the messages to and from it."""
        self._disconnect(name, self._peer(name))
        self.outgoing.lose(name, error)
        self.incoming.lose(name, error)

    # --- frames ---------------------------------------------------------------------------------------------------

    def _transmit(self, name: str, post: PostMessage, snapshot: ValueSnapshot) -> None:
        """Send a message's header and inline bytes to a peer. Idle connections to others may be closed for that."""
        frames = (encode(post), snapshot.inline)
        self._links.send(name, self._peer(name).endpoint, frames, self.outgoing.idle)

    def _released(self, snapshot: ValueSnapshot) -> None:
        """Begin the transfer of values that waited only for a receiver that no longer needs them."""
        if snapshot.ready and self._ended is None:
            self.call(partial(self.transfers.begin_if_all_ready, snapshot))

    def _reply(self, route: bytes, answer: wire.Answer, body: Bytes | None = None) -> None:
        """Answer along the route of a message. body: the bytes of a chunk."""
        if self._ended is None:
            send(self._router, (route, encode(answer), *([] if body is None else [frame(body)])))

    def _ask_relay(self, relay: Relay, want: WantMessage) -> bool:
        """Send a request to a relay. Return False if another process has its name or port by now, or if it cannot be
        reached."""
        peer = self._peer(relay.worker)
        if peer.state is PeerState.ALIVE and peer.incarnation != relay.incarnation:
            return False
        try:
            if self._links.others(relay.worker, relay.endpoint):
                # The endpoint from the source may be older than this connection, which may be in use.
                return False
            self._links.send(relay.worker, relay.endpoint, (encode(want),), self.outgoing.idle)
        except zmq.ZMQError as error:
            _log.warning("Worker %s cannot reach relay %s: %s", self.name, relay.worker, error)
            return False
        return True

    def _receive_requests(self) -> None:
        """Handle what peers that connected to this worker send."""
        for route, request, frames in received(self._router, wire.decode_request, self._reader, wire.FOLLOWED):
            self._attempt_request(route, request, frames[1:])

    def _attempt_request(self, route: bytes, request: wire.Request, frames: list[zmq.Frame]) -> None:
        """Handle a message from a peer. An exception fails the message that this one is about, at both ends."""
        handle = self._handle_request
        fail = self._fail_request
        self._attempt(partial(handle, route, request, frames), self.name, partial(fail, route, request))

    def _fail_request(self, route: bytes, request: wire.Request, error: InternalError) -> None:
        if isinstance(request, PostMessage):
            self._reply(route, wire.refused(request, error))
        elif isinstance(request, wire.ForReceiver):
            self.incoming.fail(request, error)

    def _handle_request(self, route: bytes, request: wire.Request, frames: list[zmq.Frame]) -> None:
        """Handle a message from a peer. frames: those after its header."""
        match request:
            case PostMessage():
                peer = self._peer(request.source)
                if request.receiver > self.incarnation:
                    # The sender has seen the new registration of this worker before this worker has.
                    self._until_registered.append(partial(self._attempt_request, route, request, frames))
                    return
                if self._outdated(request):
                    return
                self._record_incarnation(request.source, peer, request.incarnation)
                self.incoming.arrive(route, request, frames[0].buffer)
            case Data():
                self.incoming.receive_chunk(request, frames[0].buffer)
            case ForgetMessage():
                self._mappings.forget(request.inodes)
            case WantMessage():
                if request.receiver == self.incarnation:  # otherwise the asker soon turns to the source
                    self.incoming.handle_want(route, request)
            case wire.Transfer() | wire.SharedValues():
                self.incoming.transfers.begin(request)
            case wire.HostValues():
                self.incoming.use_host_values(request)
            case wire.FailedMessage():
                self.incoming.fail(request, error_of(request))

    def _receive_answers(self) -> None:
        """Handle what peers send over the connections of this worker to them. Tell them which slabs are closed now. An
        exception fails the message that the answer is about, at both ends."""
        for name, answer, frames in self._links.received(wire.decode_answer, self._reader, wire.FOLLOWED):
            handle = self._handle_answer
            fail = self._fail_answer
            self._attempt(partial(handle, name, answer, frames[1:]), self.name, partial(fail, name, answer))
        inodes = self._slabs.pop_closed()
        if inodes:
            self._links.send_to_all((encode(ForgetMessage(inodes=inodes)),))

    def _fail_answer(self, name: str, answer: wire.Answer, error: InternalError) -> None:
        if isinstance(answer, wire.ForSender):
            self.transfers.fail(name, answer, error)
        else:
            self.incoming.fail(answer, error)

    def _handle_answer(self, name: str, answer: wire.Answer, frames: list[zmq.Frame]) -> None:
        """Handle an answer of a peer. frames: those after its header."""
        match answer:
            case Pull():
                self._send_chunk(name, answer)
            case Data():
                self.incoming.receive_chunk(answer, frames[0].buffer)
            case wire.Ready():
                self.transfers.handle_ready(name, answer)
            case Absent():
                self.incoming.handle_absent(answer)
            case _:
                if isinstance(answer, wire.RefusedMessage):
                    self.transfers.handle_refusal(name, answer)
                self.outgoing.handle_answer(name, answer)

    def _outdated(self, post: PostMessage) -> bool:
        """Whether a message is from an earlier incarnation of its source, or for one of this worker."""
        return post.receiver != self.incarnation or post.incarnation < self._peer(post.source).incarnation

    def _send_chunk(self, name: str, pull: Pull) -> None:
        """Send the chunk that a receiver requested, unless the message or its slab is no longer kept."""
        sending = self.outgoing.message_to_pull(name, pull)
        if sending is None or sending.snapshot.slab is None:
            return
        chunk = sending.snapshot.slab.memory[pull.start : pull.start + pull.nbytes]
        self._tell(name, Data, frame(chunk), stream=pull.stream, sequence=pull.sequence, start=pull.start)

    def _tell(self, name: str, kind: Callable[..., wire.Request], *frames: zmq.Frame, **facts: Any) -> None:
        """Send a message with `facts` and the names of both ends to a peer, unless it is lost or cannot be reached."""
        peer = self._peer(name)
        if peer.state is PeerState.ALIVE and self._ended is None:
            message = kind(source=self.name, incarnation=self.incarnation, receiver=peer.incarnation, **facts)
            send = partial(self._links.send, name, peer.endpoint, (encode(message), *frames), self.outgoing.idle)
            self._attempt(send, f"{self.name} sends to {name}", partial(self._fail_peer, name))


class Timers:
    """For one thread, which calls what is `due`. `_heap`: (time, number, function), where the number keeps equal times
    in order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, seconds: float, work: Callable[[], None]) -> None:
        """Make `work` due after that time."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), work))

    @property
    def next_time(self) -> float:
        """The time of the next function on the monotonic clock, infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[Callable[[], None]]:
        """Remove and yield the functions whose time has come, in the order of their times."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
