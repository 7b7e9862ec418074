"""The ZMQ server and storage units: whose reports it takes, where orders go, and when a unit is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from dataplane.controller.requests import Facts, Reply
from dataplane.controller.zmq_server import ZmqServer
from dataplane.errors import InvalidRequestError, RequestTooLargeError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket, dealer_socket
from tests.controller.service import add_unit

pytestmark = pytest.mark.integration

WAIT_MS = 20_000


class Units:
    """A handler that adds every unit as unit 1, and keeps what else it is given."""

    min_heartbeat_s = 0.0

    def __init__(self) -> None:
        self.items: list[c.Input] = []

    def handle(self, item: c.Input, reply: Reply | None, *, caller: object, record: bytes | None = None) -> None:
        self.items.append(item)
        if isinstance(item, c.AddUnit):
            assert reply is not None
            reply(c.UnitAdded(cookie=item.cookie, unit=1))

    @property
    def kinds(self) -> list[type]:
        return [type(item) for item in self.items]


@pytest.fixture
def server() -> Iterator[ZmqServer]:
    server = ZmqServer("127.0.0.1", 0)
    server.introduce(Facts(address="here:1", epoch=1, host="host", endpoints=server.endpoints, heartbeat_s=1.0))
    yield server
    server.close()


@pytest.fixture
def connect(server: ZmqServer) -> Iterator[Callable[[], Socket]]:
    with zmq.Context() as context:
        dealers: list[Socket] = []

        def connect() -> Socket:
            dealers.append(dealer_socket(context, server.endpoints[0]))
            return dealers[-1]

        yield connect
        for dealer in dealers:
            dealer.close()


def said(server: ZmqServer, units: Units, dealer: Socket, item: c.Input) -> zmq_frames.Reply:
    """The reply to a registration or report."""
    dealer.send_multipart(zmq_frames.request(item))
    assert server.socket.poll(WAIT_MS)
    assert server.serve(units)
    return heard(dealer)


def heard(dealer: Socket) -> zmq_frames.Reply:
    assert dealer.poll(WAIT_MS)
    (reply,) = zmq_frames.Reply.parse(dealer.recv_multipart())
    return reply


def unit_message(reply: zmq_frames.Reply) -> zmq_frames.UnitMessage:
    return messages.decode_with(zmq_frames.UNIT_MESSAGE, reply.good_body())


def until_lost(server: ZmqServer, units: Units) -> None:
    while c.UnitLost not in units.kinds:
        assert server.monitor.poll(WAIT_MS)
        server.notice_disconnects(units)


ALIVE = c.SessionAlive(unit=1, session=2)


def test_a_unit_is_answered_and_ordered_until_its_connection_ends(
    server: ZmqServer, connect: Callable[[], Socket]
) -> None:
    units = Units()
    dealer = connect()
    assert isinstance(unit_message(said(server, units, dealer, add_unit())), c.UnitAdded)
    assert isinstance(unit_message(said(server, units, dealer, ALIVE)), zmq_frames.ReportHandled)
    server.order(c.GrowArena(unit=1, backed_bytes=7))
    assert isinstance(unit_message(heard(dealer)), c.GrowArena)
    dealer.close()
    until_lost(server, units)
    assert units.kinds == [c.AddUnit, c.SessionAlive, c.UnitLost]
    server.order(c.GrowArena(unit=1, backed_bytes=7))  # to nobody


def test_the_end_of_a_connection_that_another_one_replaced_loses_no_unit(
    server: ZmqServer, connect: Callable[[], Socket]
) -> None:
    units = Units()
    first = connect()
    second = connect()
    said(server, units, first, add_unit())
    said(server, units, second, add_unit())
    server.order(c.GrowArena(unit=1, backed_bytes=7))
    assert isinstance(unit_message(heard(second)), c.GrowArena)
    assert not first.poll(0)
    assert isinstance(said(server, units, first, ALIVE).error, ServiceUnavailableError)
    server.notice_disconnects(units)
    first.close()
    assert server.monitor.poll(WAIT_MS)
    server.notice_disconnects(units)
    assert units.kinds == [c.AddUnit, c.AddUnit]
    second.close()
    until_lost(server, units)


def test_reports_are_taken_from_the_unit_that_they_are_about(server: ZmqServer, connect: Callable[[], Socket]) -> None:
    units = Units()
    dealer = connect()
    assert isinstance(said(server, units, dealer, ALIVE).error, ServiceUnavailableError)
    said(server, units, dealer, add_unit())
    other = said(server, units, dealer, c.SessionAlive(unit=2, session=2)).error
    assert isinstance(other, InvalidRequestError)
    assert "the connection of storage unit 1 accepts only its reports, got SessionAlive of unit 2" in str(other)
    again = said(server, units, dealer, add_unit()).error
    assert isinstance(again, InvalidRequestError)
    assert units.kinds == [c.AddUnit]


def test_a_unit_that_takes_no_orders_is_lost_and_told_so(server: ZmqServer, connect: Callable[[], Socket]) -> None:
    units = Units()
    dealer = connect()
    said(server, units, dealer, add_unit())
    (link,) = server._link_at.values()
    server._note_unreachable(link.caller, zmq.Again())
    refused = said(server, units, dealer, ALIVE).error
    assert isinstance(refused, ServiceUnavailableError)
    assert units.kinds == [c.AddUnit, c.UnitLost]
    said(server, units, connect(), add_unit())


def test_a_unit_that_ended_before_it_was_added_is_lost_before_the_next_message(
    server: ZmqServer, connect: Callable[[], Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages are read after the end of the connection, if very many came before them."""
    units = Units()
    gone = connect()
    said(server, units, gone, c.Heartbeat(session=4))
    (descriptor,) = server._session_of
    monkeypatch.setattr(ZmqServer, "_take_descriptor", lambda *_: descriptor)
    frames = [zmq.Frame(b"\0gone"), *zmq_frames.request(add_unit())]
    server._handle_request(units, frames[0], frames[1])  # type: ignore[arg-type]  # of a peer that is not there
    monkeypatch.undo()
    assert server._unreachable
    said(server, units, connect(), c.Heartbeat(session=5))
    assert units.kinds == [c.Heartbeat, c.AddUnit, c.UnitLost, c.Heartbeat]


def test_a_unit_whose_descriptor_has_another_connection_is_lost(
    server: ZmqServer, connect: Callable[[], Socket]
) -> None:
    units = Units()
    dealer = connect()
    said(server, units, dealer, add_unit())
    (link,) = server._link_at.values()
    link.caller = b"of an earlier connection"
    said(server, units, dealer, c.Heartbeat(session=5))
    assert units.kinds == [c.AddUnit, c.UnitLost, c.Heartbeat]


@pytest.mark.parametrize(
    "wrong",
    [
        {"cookie": ""},
        {"capacity_bytes": -1},
        {"backed_bytes": -1},
        {"endpoints": ("foo",)},
        {"curve_key": "short"},
        {"unit": -1},
    ],
    ids=str,
)
def test_an_offer_with_impossible_values_is_refused(
    server: ZmqServer, connect: Callable[[], Socket], wrong: dict[str, Any]
) -> None:
    units = Units()
    reply = said(server, units, connect(), msgspec.structs.replace(add_unit(), **wrong))
    assert isinstance(reply.error, InvalidRequestError)
    assert units.items == []


def test_a_message_whose_frames_are_too_large_together_is_refused(
    server: ZmqServer, connect: Callable[[], Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_frames, "MAX_MESSAGE_BYTES", 100)
    dealer = connect()
    dealer.send_multipart([bytes(60), bytes(60)])
    assert server.socket.poll(WAIT_MS)
    assert server.serve(Units())
    assert isinstance(heard(dealer).error, RequestTooLargeError)
