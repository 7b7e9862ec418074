"""Requests that share a message, and replies that share one: each has the outcome that it has alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
import zmq

from dataplane.client.rpc.handshake import Socket, dealer_socket
from dataplane.controller.event_loop import LedgerThread
from dataplane.controller.requests import Facts, message_of
from dataplane.controller.zmq_server import ZmqServer
from dataplane.errors import DataPlaneError, InvalidRequestError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from tests.controller.service import ScriptedLedger
from tests.ledger.driver import Driver
from tests.ledger.fingerprint import fingerprint
from tests.ledger.test_replay import a_busy_day

pytestmark = pytest.mark.integration

WAIT_MS = 20_000


class Link:
    """A service whose ledger runs in this thread, and one socket for each session."""

    def __init__(self) -> None:
        self.server = ZmqServer("127.0.0.1", 0)
        self.facts = Facts(address="here:1", epoch=7, host="host", endpoints=self.server.endpoints, heartbeat_s=1.0)
        self.server.introduce(self.facts)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._dealers: dict[int, Socket] = {}

    def dealer(self, session: int) -> Socket:
        if session not in self._dealers:
            self._dealers[session] = dealer_socket(self._context, self.server.endpoints[0])
        return self._dealers[session]

    def serve(self, shell: LedgerThread, session: int, messages: list[list[bytes]]) -> None:
        """Send the messages and have them handled."""
        for frames in messages:
            self.dealer(session).send_multipart(frames)
        for _ in messages:
            assert self.server.socket.poll(WAIT_MS)
            assert self.server.serve(shell)

    def replies(self, session: int, count: int) -> list[list[zmq_frames.Reply]]:
        """The replies of each message that came, until they are `count`."""
        came: list[list[zmq_frames.Reply]] = []
        while sum(map(len, came)) < count:
            assert self.dealer(session).poll(WAIT_MS)
            came.append(zmq_frames.Reply.parse(self.dealer(session).recv_multipart()))
        return came

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.server.close()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def as_reply(output: c.Answer, facts: Facts) -> zmq_frames.Reply:
    try:
        frames = zmq_frames.answer(output.number, message_of(output, facts).SerializeToString())
    except DataPlaneError as error:
        frames = zmq_frames.refusal(output.number, error)
    return zmq_frames.Reply.parse(frames)[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_history_in_shared_messages_has_the_outcome_of_one_in_single_messages(link: Link, seed: int) -> None:
    driver = Driver(capacity=64 * 1024)
    a_busy_day(driver, seed, 200)
    alone = Ledger(7, **driver.settings)
    expected: dict[int, list[zmq_frames.Reply]] = defaultdict(list)
    for item in driver.log:
        for output in alone.apply(item):
            if isinstance(output, c.Answer):
                expected[output.session].append(as_reply(output, link.facts))

    together = Ledger(7, **driver.settings)
    shell = LedgerThread(together, link.server, link.facts, clock=lambda: 0.0)
    chance = random.Random(seed)
    left = list(driver.log)
    while left:
        first = left.pop(0)
        if not isinstance(first, c.Call):
            shell.handle(first, None)
            continue
        calls = [first]
        most = chance.randrange(1, 80)
        while left and isinstance(left[0], c.Call) and left[0].session == first.session and len(calls) < most:
            calls.append(left.pop(0))
        link.serve(shell, first.session, list(zmq_frames.messages(zmq_frames.request(call) for call in calls)))
    assert fingerprint(together) == fingerprint(alone)
    assert expected
    for session, replies in expected.items():
        came = [each for message in link.replies(session, len(replies)) for each in message]
        assert sorted(came, key=repr) == sorted(replies, key=repr)


def seals(*numbers: int, session: int = 3) -> list[list[bytes]]:
    return [
        zmq_frames.request(c.Call(session=session, number=number, watermark=1, command=c.Seal(partition="p")))
        for number in numbers
    ]


def test_a_malformed_request_spoils_no_other_of_its_message(link: Link) -> None:
    ledger = ScriptedLedger()
    shell = LedgerThread(ledger, link.server, link.facts)
    (message,) = zmq_frames.messages([*seals(1), [b"Units", b"\xff\xff"], *seals(2)])
    link.serve(shell, 3, [message])
    (replies,) = link.replies(3, 3)
    assert [reply.number for reply in replies] == [1, 0, 2]
    with pytest.raises(InvalidRequestError, match="not a Units message"):
        replies[1].good_body()
    assert [call.number for call in ledger.of(c.Seal)] == [1, 2]
