"""A receive that joins values which are being pulled from another receiver, for others or for one that gave up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dataplane.warm import WarmMemory
from tests.messengers import want_of
from workers.messages.backlog import Backlog
from workers.messages.deliveries import Posting
from workers.messages.incoming import Incoming
from workers.messages.options import CollectiveGroupOptions
from workers.messages.outgoing import Contact
from workers.messages.relays import RELAY_S, Relays
from workers.messages.slabs import Mappings
from workers.messages.wire import ObjectForm, Post, Pull, Relay, Slab, Want

NBYTES = 1000
OPTIONS = CollectiveGroupOptions()
RELAY = Relay("relay", 1, "127.0.0.1:1", 1)
POST = Post(
    stream=b"s",
    number=0,
    source="source",
    incarnation=1,
    receiver=1,
    form=ObjectForm(),
    options=OPTIONS,
    segments=(),
    skeleton_from=0,
    nbytes=NBYTES,
    slab=Slab("elsewhere", 1, 3, 1, NBYTES),
    settling=False,
    serial=1,
    relay=RELAY,
    passes_on=True,
)


class Engine:
    """What an engine is to `Incoming`, without sockets or a clock."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []
        self.said: list[Any] = []
        self.wants: list[Want] = []
        reply, later = self._reply, lambda seconds, work: self.timers.append((seconds, work))
        self.incoming = Incoming(
            "me",
            Mappings("here"),
            WarmMemory(0),
            Relays(Backlog(1 << 20), reply, lambda seconds, work: None),
            reply=reply,
            ask=self._ask,
            later=later,
            call=lambda work: work(),
            contact=lambda *_: Contact(OPTIONS),
            forget=lambda *_: None,
            busy=lambda: False,
            lives=lambda _: True,
            outdated=lambda _: False,
        )

    def _reply(self, route: bytes, answer: Any, body: Any = None) -> None:
        self.said.append(answer)

    def _ask(self, relay: Relay, want: Want) -> bool:
        self.wants.append(want)
        return True

    @property
    def turned(self) -> bool:
        """Whether the source was asked."""
        return any(isinstance(answer, Pull) for answer in self.said)


def _receive(within_s: float) -> Posting:
    now = time.monotonic()
    return Posting(
        source="source",
        stream=b"s",
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
    engine.incoming.wanted(b"other", want)
    assert [want.receiver for want in engine.wants] == [1], "it is being pulled from the relay"
    (at_s, _), *others = engine.timers
    assert at_s == RELAY_S
    assert not others


def test_one_that_has_less_time_turns_to_the_source_in_time(engine: Engine) -> None:
    _pulled_for_others(engine)
    engine.incoming.post(_receive(RELAY_S / 2), lives=True)
    at_s, look = engine.timers[-1]
    assert at_s <= RELAY_S / 8
    look()
    assert engine.turned
