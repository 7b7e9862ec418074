"""Receives and messages that met, without sockets: those that are given up, and those that join values which are being
pulled from another receiver, for others or for one that gave up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dataplane.core.buffer_pool import BufferPool
from tests.workers.messages.messengers import no_collectives, want_of
from workers.messages.deliveries import Posting
from workers.messages.incoming import Incoming
from workers.messages.outgoing import Contact
from workers.messages.relays import RELAY_S, Backlog, Relays
from workers.messages.shared_buffers import Mappings
from workers.messages.wire import CollectiveGroupOptions, ObjectForm, PostMessage, Pull, Relay, Slab, WantMessage
from workers.transport.pickling import Layout

NBYTES = 1000
OPTIONS = CollectiveGroupOptions()
RELAY = Relay("relay", 1, "127.0.0.1:1", 1)
POST = PostMessage(
    stream=b"s",
    sequence=0,
    source="source",
    incarnation=1,
    receiver=1,
    form=ObjectForm(),
    options=OPTIONS,
    layout=Layout((), 0, NBYTES),
    slab=Slab("elsewhere", 1, 3, 1, NBYTES),
    serial=1,
    relay=RELAY,
    passes_on=True,
)


class Engine:
    """What an engine is to `Incoming`, without sockets or a clock."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []
        self.said: list[Any] = []
        self.wants: list[WantMessage] = []
        reply, later = self._reply, lambda seconds, work: self.timers.append((seconds, work))
        self.incoming = Incoming(
            "me",
            Mappings("here"),
            BufferPool(0),
            Relays(Backlog(1 << 20), reply, lambda seconds, work: None),
            no_collectives(),
            reply=reply,
            ask_relay=self._ask,
            schedule=later,
            call=lambda work: work(),
            contact=lambda *_: Contact(OPTIONS),
            forget=lambda *_: None,
            is_alive=lambda _: True,
        )

    def _reply(self, route: bytes, answer: Any, body: Any = None) -> None:
        self.said.append(answer)

    def _ask(self, relay: Relay, want: WantMessage) -> bool:
        self.wants.append(want)
        return True

    @property
    def turned(self) -> bool:
        """Whether the source was asked."""
        return any(isinstance(answer, Pull) for answer in self.said)


def _receive(within_s: float, stream: bytes = b"s") -> Posting:
    now = time.monotonic()
    return Posting(
        source="source",
        stream=stream,
        options=OPTIONS,
        target=None,
        form=ObjectForm(),
        device=None,
        ready=None,
        eager=True,
        what="a receive",
        begun=now,
        deadline=now + within_s,
    )


@pytest.fixture
def engine() -> Engine:
    return Engine()


def _pulled_for_others(engine: Engine) -> None:
    want = want_of("source", nbytes=NBYTES)
    engine.incoming.arrive(b"route", POST, b"")
    engine.incoming.handle_want(b"other", want)
    assert [want.receiver for want in engine.wants] == [1], "it is being pulled from the relay"
    (at_s, _), *others = engine.timers
    assert at_s == RELAY_S
    assert not others


def test_one_that_has_less_time_turns_to_the_source_in_time(engine: Engine) -> None:
    _pulled_for_others(engine)
    engine.incoming.post(_receive(RELAY_S / 2), is_alive=True)
    at_s, look = engine.timers[-1]
    assert at_s <= RELAY_S / 8
    look()
    assert engine.turned
