"""A storage unit's link: acceptance, reports, orders, and both ends' going away."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest

from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.errors import AuthenticationError, ClientClosedError, InvalidRequestError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol.grpc_loader import import_with_grpc
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.pb import control_pb2_grpc
from dataplane.protocol.server_keys import OPEN
from dataplane.storage import controller_link
from dataplane.storage.controller_link import UnitLink
from tests.controller.service import ScriptedLedger, add_unit
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig()
WAIT_S = 60.0
SLOW_S = 0.5
"""A service that is asked does nothing for so long."""
PINGS_S = 6.0
"""Time for some pings, of which gRPC sends one a second at the most; the third unwelcome one would end the link."""


@pytest.fixture
def ledger() -> ScriptedLedger:
    return ScriptedLedger()


@pytest.fixture
def scripted(ledger: ScriptedLedger) -> Iterator[Controller]:
    with Controller(CONFIG, ledger=ledger, epoch=1) as controller:
        yield controller


def refuse(order: c.UnitOrder) -> None:
    raise AssertionError(order)


def test_reports_go_in_and_orders_come_out_in_order(scripted: Controller, ledger: ScriptedLedger) -> None:
    link = UnitLink(scripted.address, None)
    orders: queue.SimpleQueue[c.UnitOrder] = queue.SimpleQueue()
    apply = ledger.apply

    def ordering(item: c.Input) -> list[c.Output]:
        more: list[c.Output] = []
        if isinstance(item, c.AddUnit | c.Grown):
            more = [c.GrowArena(unit=1, backed_bytes=n) for n in (1, 2, 3)]
        return apply(item) + more

    ledger.apply = ordering  # type: ignore[method-assign]
    early = c.SessionAttached(unit=1, session=9)
    link.report(early)
    assert link.open(add_unit(), orders.put) == 1
    assert [ledger.wait_for(c.AddUnit)[0].name, ledger.wait_for(c.SessionAttached)[0].session] == ["unit", 9]
    for report in (
        c.SessionGone(unit=1, session=1),
        c.SessionAlive(unit=1, session=2),
        c.Grown(unit=1, backed_bytes=5),
    ):
        link.report(report)
    ledger.wait_for(c.Grown)
    told = [type(item) for item in ledger.inputs]
    assert told == [c.AddUnit, c.SessionAttached, c.SessionGone, c.SessionAlive, c.Grown]
    got = [orders.get(timeout=WAIT_S) for _ in range(6)]
    assert [order.backed_bytes for order in got if isinstance(order, c.GrowArena)] == [1, 2, 3, 1, 2, 3]
    link.close()
    assert [lost.unit for lost in ledger.wait_for(c.UnitLost)] == [1]
    link.close()


def test_closing_delivers_what_was_reported(scripted: Controller, ledger: ScriptedLedger) -> None:
    link = UnitLink(scripted.address, None)
    link.open(add_unit(), refuse)
    for session in range(100):
        link.report(c.SessionGone(unit=1, session=session))
    link.close()
    ledger.wait_for(c.UnitLost)
    assert len(ledger.of(c.SessionGone)) == 100


def test_the_ledgers_refusal_is_raised() -> None:
    with Controller(CONFIG) as controller:
        first, second = UnitLink(controller.address, None), UnitLink(controller.address, None)
        assert first.open(add_unit(), lambda order: None) == 1
        with pytest.raises(InvalidRequestError):
            second.open(add_unit(), refuse)
        first.close()


def test_a_full_port_is_tried_again(ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_with_grpc("dataplane.controller.grpc_server"), "MAX_CALLS", 1)
    monkeypatch.setattr(controller_link, "keys_of", lambda address, *asked, **more: replace(OPEN, address=address))
    with Controller(CONFIG, ledger=ledger, epoch=1) as controller, grpc.insecure_channel(controller.address) as channel:
        beats: queue.SimpleQueue[pb.HeartbeatRequest | None] = queue.SimpleQueue()
        beats.put(pb.HeartbeatRequest(session=1))
        control = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        held = control.KeepSession(iter(beats.get, None))
        assert next(held)
        late = UnitLink(controller.address, None)
        monkeypatch.setattr(late._answered, "wait", lambda rest_s: not wait_until(lambda: late._busy, "a refusal"))
        with pytest.raises(ServiceUnavailableError, match="the service is busy"):
            late.open(add_unit(), refuse)
        tries = counted(monkeypatch)
        link = UnitLink(controller.address, None)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(link.open, add_unit(), refuse)
            wait_until(lambda: len(tries) > 1, "a second try")
            held.cancel()
            assert opening.result(WAIT_S) == 1
        beats.put(None)
        link.close()


def test_a_service_that_is_slow_at_first_is_waited_for(
    scripted: Controller, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than for any later answer."""
    slow = threading.Event()
    apply, keys_of = ledger.apply, controller_link.keys_of

    def late(item: c.Input) -> list[c.Output]:
        slow.wait(SLOW_S)
        return apply(item)

    def late_keys(*asked: Any, **more: Any) -> Any:
        slow.wait(SLOW_S)
        return keys_of(*asked, **more)

    monkeypatch.setattr(ledger, "apply", late)
    monkeypatch.setattr(controller_link, "keys_of", late_keys)
    link = UnitLink(scripted.address, None, timeout_s=SLOW_S / 10)
    assert link.open(add_unit(), refuse) == 1
    slow.set()
    link.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the streams that links make from now on."""
    tries: list[str] = []
    stream = UnitLink._open_stream

    def counting(link: UnitLink, address: str) -> Any:
        tries.append(address)
        return stream(link, address)

    monkeypatch.setattr(UnitLink, "_open_stream", counting)
    return tries


def test_a_closed_link_is_not_opened(scripted: Controller) -> None:
    link = UnitLink(scripted.address, None)
    link.close()
    with pytest.raises(ClientClosedError):
        link.open(add_unit(), refuse)


def test_a_unit_speaks_for_itself_only(scripted: Controller, ledger: ScriptedLedger) -> None:
    link = UnitLink(scripted.address, None)
    link.open(add_unit(), refuse)
    link.report(c.SessionGone(unit=2, session=1))
    assert link.lost.wait(WAIT_S)
    ledger.wait_for(c.UnitLost)
    assert ledger.of(c.SessionGone) == []
    link.report(c.SessionGone(unit=1, session=1))
    link.close()


def test_a_controller_that_goes_away_is_noticed(ledger: ScriptedLedger) -> None:
    controller = Controller(CONFIG, ledger=ledger, epoch=1).start()
    link = UnitLink(controller.address, None, reconnect_s=0.2)
    link.open(add_unit(), refuse)
    controller.stop()
    assert link.lost.wait(WAIT_S)
    link.close()


def test_a_dead_address_and_a_wrong_token_are_named() -> None:
    link = UnitLink("127.0.0.1:1", None)
    with pytest.raises(ServiceUnavailableError, match="no data plane service at 127"):
        link.open(add_unit(), refuse)
    with Controller(replace(CONFIG, token="secret")) as controller:
        with pytest.raises(AuthenticationError, match="no token"):
            UnitLink(controller.address, None).open(add_unit(), refuse)
        with pytest.raises(AuthenticationError, match="wrong"):
            UnitLink(controller.address, "guess").open(add_unit(), refuse)
        link = UnitLink(controller.address, "secret")
        assert link.open(add_unit(), lambda order: None) == 1
        link.close()


def test_pings_on_an_idle_link_are_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller must not take keepalive pings for abuse: a link that carries nothing lives on."""
    import_with_grpc("dataplane.controller.grpc_server")
    import_with_grpc("dataplane.storage.grpc_stream")
    server_module, link_module = (
        sys.modules["dataplane.controller.grpc_server"],
        sys.modules["dataplane.storage.grpc_stream"],
    )
    quick = {
        "grpc.keepalive_time_ms": 100,
        "grpc.keepalive_timeout_ms": int(1000 * WAIT_S),
        "grpc.http2.min_ping_interval_without_data_ms": 20,
    }
    for module in (server_module, link_module):
        monkeypatch.setattr(module, "OPTIONS", tuple((name, quick.get(name, value)) for name, value in module.OPTIONS))
    streams = counted(monkeypatch)
    with Controller(CONFIG, epoch=1) as controller:
        link = UnitLink(controller.address, None)
        link.open(add_unit(), refuse)
        assert not link.lost.wait(PINGS_S)
        assert len(streams) == 1, "one that the controller ends is made again"
        link.close()
