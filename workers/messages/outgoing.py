"""Outgoing messages, each kept until its receiver took or refused it. For the I/O thread only."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dataplane.errors import DataPlaneError, InternalError
from workers.directory.address import WorkerAddress
from workers.errors import GroupOptionsError, MessageTimeoutError, WorkerLostError
from workers.messages.collectives import CollectiveGroup
from workers.messages.snapshots import ValueSnapshot
from workers.messages.wire import (
    CollectiveGroupOptions,
    ForSender,
    Held,
    MessageReceived,
    PostMessage,
    RefusedMessage,
)
from workers.transport.encoding import error_of

_log = logging.getLogger(__name__)
_DEFAULT = CollectiveGroupOptions()


@dataclass(eq=False)
class Sending:
    """A message to one receiver. begun, deadline: on the monotonic clock; future: of the send; sequence: of the message
    in its stream to this receiver, -1 before `queue`; kept: the receiver no longer needs this worker's bytes; group:
    the process group in which its values travel, if any."""

    to: str
    stream: bytes
    snapshot: ValueSnapshot
    options: CollectiveGroupOptions | None
    what: str
    begun: float
    deadline: float
    future: Future[None] = field(default_factory=Future)
    sequence: int = -1
    kept: bool = False
    collective: CollectiveGroup | None = None

    def complete(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def fail(self, error: Exception) -> bool:
        """Fail the message. Return whether it was still pending."""
        was_pending = not self.future.done()
        if was_pending:
            self.future.set_exception(error)
        return was_pending


@dataclass
class Contact:
    """The options of a pair of workers, or of two workers of a broadcast. proven: the other end agreed."""

    options: CollectiveGroupOptions
    proven: bool = False


Transmit = Callable[[str, PostMessage, ValueSnapshot], None]
"""Sends a post to a receiver whose endpoint is known."""


class OutgoingMessages:
    """The messages that this worker sends. worker: this end's name. transmit: of the I/O thread; released:
    called with the values of a message that its receiver no longer needs.

    contacts: by receiver and stream. `_queued`: the messages for `flush`, by receiver. `_sent`: those sent and neither
    received nor refused, by receiver, then by stream and sequence number. `_sequences`: the next one by receiver and
    stream.
    `_late`: by receiver, the error of a message whose `send` had returned.
    """

    def __init__(self, worker: str, transmit: Transmit, released: Callable[[ValueSnapshot], None]) -> None:
        self._worker = worker
        self._released = released
        self._transmit = transmit
        self.contacts: dict[tuple[str, bytes], Contact] = {}
        self._queued: dict[str, deque[Sending]] = {}
        self._sent: dict[str, dict[tuple[bytes, int], Sending]] = {}
        self._sequences: dict[tuple[str, bytes], int] = {}
        self._late: dict[str, Exception] = {}

    def contact(self, peer: str, stream: bytes, options: CollectiveGroupOptions | None) -> Contact:
        """Return the contact of this pair or group; `options` apply if it is new."""
        return self.contacts.setdefault((peer, stream), Contact(options or _DEFAULT))

    def forget(self, peer: str, stream: bytes) -> None:
        """Forget a contact without an agreement: the next one is the first."""
        self.contacts.pop((peer, stream), None)

    def queue(self, sending: Sending) -> None:
        """Queue a message until its receiver is known: `flush` then sends it. It gets its sequence number
        now, so messages that are never sent use up one too."""
        sending.sequence = self._next_sequence(sending.to, sending.stream)
        self._queued.setdefault(sending.to, deque()).append(sending)

    def skip(self, peers: Sequence[WorkerAddress], stream: bytes) -> None:
        """Use up the sequence number of a call that failed and that cannot be reported to the receivers."""
        for peer in peers:
            self._next_sequence(peer.get_name(), stream)

    def _next_sequence(self, peer: str, stream: bytes) -> int:
        """Return the sequence number of the next message to that peer in this stream, counted since the peer
        started."""
        sequence = self._sequences.get((peer, stream), 0)
        self._sequences[peer, stream] = sequence + 1
        return sequence

    def flush(self, peer: str, ours: int, theirs: int, endpoint: str) -> None:
        """Send the messages queued for `peer`. ours, theirs: the incarnations of both ends; endpoint: of the peer. A
        message that cannot be sent fails alone."""
        for sending in self._queued.pop(peer, ()):
            try:
                self._send(peer, sending, ours, theirs, endpoint)
            except Exception as error:
                _log.exception("%s failed", sending.what)
                # `_drop` also releases the snapshot. If `_send` failed before it recorded the message, there is only
                # the snapshot to release.
                if self._find_sent(peer, sending.stream, sending.sequence) is sending:
                    self._drop(sending)
                else:
                    self._release(sending)
                sending.fail(InternalError(what=f"{sending.what}: {error!r}"))

    def _send(self, peer: str, sending: Sending, ours: int, theirs: int, endpoint: str) -> None:
        """Record the message as sent, give its receiver a place in the tree of relays (if there is one), and transmit
        it. ours, theirs, endpoint: see `flush`."""
        contact = self.contact(peer, sending.stream, sending.options)
        self._sent.setdefault(peer, {})[sending.stream, sending.sequence] = sending
        snapshot = sending.snapshot
        tree = snapshot.tree
        relay, passes_on = (None, False) if tree is None else tree.place(peer, theirs, endpoint)
        post = PostMessage(
            stream=sending.stream,
            sequence=sending.sequence,
            source=self._worker,
            incarnation=ours,
            receiver=theirs,
            form=snapshot.form,
            options=contact.options,
            layout=snapshot.layout,
            slab=None if snapshot.slab is None else snapshot.slab.name,
            serial=snapshot.serial,
            relay=relay,
            passes_on=passes_on,
            offer=snapshot.offer,
        )
        self._transmit(peer, post, snapshot)

    def handle_answer(self, peer: str, answer: Held | MessageReceived | RefusedMessage) -> None:
        """Handle an answer to a sent message. The send completes when the message was received, or is queued at its
        receiver. A refusal fails it. Answers to messages already dropped are ignored."""
        sending = self._find_sent(peer, answer.stream, answer.sequence)
        if sending is None:
            return
        match answer:
            case Held():
                sending.kept = answer.kept
                sending.complete()
            case MessageReceived():
                contact = self.contact(peer, answer.stream, sending.options)
                contact.proven = True
                self._drop(sending)
                sending.complete()
            case RefusedMessage():
                self._drop(sending)
                self._fail_refused(sending, error_of(answer))

    def _fail_refused(self, sending: Sending, error: DataPlaneError) -> None:
        """Fail a refused message. If its `send` has returned, keep the error for the next operation with that
        peer."""
        contact = self.contacts.get((sending.to, sending.stream))
        # The options were not agreed on, so the next message is the first contact again.
        if isinstance(error, GroupOptionsError) and contact is not None and not contact.proven:
            del self.contacts[sending.to, sending.stream]
        if not sending.fail(error):
            _log.error("%s was refused after its delivery: %s", sending.what, error)
            self._late[sending.to] = error

    def give_up(self, peer: str, message: ForSender | Sending, error: DataPlaneError) -> bool:
        """Drop and fail a sent message that its receiver cannot get. Return False if it was received or refused."""
        sending = self._find_sent(peer, message.stream, message.sequence)
        if sending is not None:
            self._drop(sending, may_be_read=True)
            self._fail_refused(sending, error)
        return sending is not None

    def message_to_pull(self, peer: str, pull: ForSender | Sending) -> Sending | None:
        """Return the message whose values a receiver requests, None if it was received or refused."""
        return self._find_sent(peer, pull.stream, pull.sequence)

    def _find_sent(self, peer: str, stream: bytes, sequence: int) -> Sending | None:
        """Return the message if it was sent and neither received nor refused."""
        return self._sent.get(peer, {}).get((stream, sequence))

    def late_error(self, peer: str) -> Exception | None:
        """Return the error of a message that was reported after its `send` had returned, once."""
        return self._late.pop(peer, None)

    def expire(self, now: float) -> float:
        """Fail the messages whose deadline passed; those already sent may still arrive. Return the next deadline of a
        pending send, infinity if there is none."""
        overdue = [sending for queue in self._queued.values() for sending in queue if sending.deadline <= now]
        for sending in overdue:  # not sent yet: the lookup of the receiver has not ended
            self._queued[sending.to].remove(sending)
            self._release(sending)
            what = f"{sending.what} (no such worker is registered; check that its group was launched under this name)"
            sending.fail(MessageTimeoutError(what=what, waited_s=now - sending.begun))
        # Sent messages are kept after their send has failed: their receivers may still take them.
        for sending in [sending for sending in self.sent() if sending.deadline <= now]:
            sending.fail(MessageTimeoutError(what=sending.what, waited_s=now - sending.begun))
        waiting = itertools.chain(self.sent(), *self._queued.values())
        return min((sending.deadline for sending in waiting if not sending.future.done()), default=math.inf)

    def lose(self, peer: str, error: Exception) -> bool:
        """Fail all messages to the peer and forget its contacts. After a `WorkerLostError` the numbering restarts,
        because the peer's process has ended. Return whether any of the messages was pending."""
        any_pending = False
        for sending in self._queued.pop(peer, []):
            any_pending |= sending.fail(error)
            self._release(sending)
        for sending in list(self._sent.get(peer, {}).values()):
            self._drop(sending, may_be_read=True)  # the peer's process may still run
            any_pending |= sending.fail(error)
        for key in [key for key in self.contacts if key[0] == peer]:
            del self.contacts[key]
        if isinstance(error, WorkerLostError):
            for key in [key for key in self._sequences if key[0] == peer]:
                del self._sequences[key]
        return any_pending

    def fail_all(self, error: Exception) -> None:
        """Fail all messages: every peer is lost. If messages were delivered and none was pending, the next operation
        with that peer raises the error, because those messages may be lost."""
        peers = {*self._queued, *self._sent}
        peers.update(peer for peer, _ in self.contacts)
        peers.update(peer for peer, _ in self._sequences)
        for peer in peers:
            delivered = peer in self._sent  # looked up first, because `lose` removes the sent messages
            if not self.lose(peer, error) and delivered:
                self._late[peer] = error

    @property
    def settled(self) -> bool:
        """Whether no receiver needs this worker for the messages it sent."""
        return not any(self._queued.values()) and all(sending.kept for sending in self.sent())

    def idle(self, peer: str) -> bool:
        """Whether no message to that peer is queued, in transit or waiting for its receive."""
        return peer not in self._sent and not self._queued.get(peer)

    def sent(self) -> Iterator[Sending]:
        """Yield the messages that were sent and neither received nor refused."""
        for sent in self._sent.values():
            yield from sent.values()

    def _drop(self, sending: Sending, *, may_be_read: bool = False) -> None:
        """Remove a sent message and release its snapshot. may_be_read: see `ValueSnapshot.release`."""
        sent = self._sent[sending.to]
        del sent[sending.stream, sending.sequence]
        if not sent:
            del self._sent[sending.to]
        self._release(sending, may_be_read=may_be_read)

    def _release(self, sending: Sending, *, may_be_read: bool = False) -> None:
        sending.snapshot.release(may_be_read=may_be_read)
        self._released(sending.snapshot)
