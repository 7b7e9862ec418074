"""A storage unit's link: acceptance, reports, orders, and both ends' going away."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.core.addresses import split_address
from dataplane.errors import (
    AuthenticationError,
    ClientClosedError,
    InvalidRequestError,
    ServiceUnavailableError,
)
from dataplane.ledger import commands as c
from dataplane.storage import controller_link
from dataplane.storage.controller_link import UnitLink
from tests.controller.service import ScriptedLedger, add_unit
from tests.logs import logged
from tests.ports import free_ports
from tests.restarts import Proxy

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig()
WAIT_S = 60.0
SLOW_S = 0.5
"""A service that is asked does nothing for so long."""


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


def test_a_service_that_restarts_while_a_unit_registers_is_tried_again(
    ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after it has answered the unit's greeting."""
    tries = counted(monkeypatch)
    socket_for = controller_link.unconnected_dealer

    def stale(context: Any, endpoint: str, token: str | None) -> Any:
        return socket_for(context, endpoint, token if len(tries) > 1 else "of another service")

    monkeypatch.setattr(controller_link, "unconnected_dealer", stale)
    with Controller(replace(CONFIG, token="secret"), ledger=ledger, epoch=1) as controller:
        link = UnitLink(controller.address, "secret")
        assert link.open(add_unit(), refuse) == 1
        assert len(tries) == 2
        assert len(ledger.of(c.AddUnit)) == 1
        link.close()


def test_a_service_that_is_slow_at_first_is_waited_for(
    scripted: Controller, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than for any later answer."""
    slow = threading.Event()
    apply, reach = ledger.apply, controller_link.reach

    def late(item: c.Input) -> list[c.Output]:
        slow.wait(SLOW_S)
        return apply(item)

    def late_reach(*asked: Any, **more: Any) -> Any:
        slow.wait(SLOW_S)
        return reach(*asked, **more)

    monkeypatch.setattr(ledger, "apply", late)
    monkeypatch.setattr(controller_link, "reach", late_reach)
    link = UnitLink(scripted.address, None, timeout_s=SLOW_S / 10)
    assert link.open(add_unit(), refuse) == 1
    slow.set()
    link.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the connections that links make from now on."""
    tries: list[str] = []
    connect = UnitLink._connect

    def counting(link: UnitLink, *rest: Any) -> Any:
        tries.append(link._address)
        return connect(link, *rest)

    monkeypatch.setattr(UnitLink, "_connect", counting)
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


def test_both_ends_notice_that_the_other_one_has_vanished(
    ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network stops without a word to either end, after the first ping."""
    monkeypatch.setattr(controller_link, "PING_S", 0.1)
    monkeypatch.setattr(controller_link, "SILENT_S", 0.5)
    with Controller(replace(CONFIG, port=free_ports(2)), ledger=ledger, epoch=1) as controller:
        port = split_address(controller.address)[1]
        with contextlib.closing(Proxy(port)) as proxy:
            pinged = threading.Event()
            proxy.carried = lambda content: pinged.set() if b"\4PING" in content else None
            link = UnitLink(f"127.0.0.1:{proxy.port}", None)
            link.open(add_unit(), refuse)
            assert pinged.wait(WAIT_S)
            with logged("Connection to the controller at"):
                proxy.pause()
                ledger.wait_for(c.UnitLost)
            proxy.heal()
            ledger.wait_for(c.AddUnit, 2)
            assert not link.lost.is_set()
            link.close()


def test_a_link_says_what_it_is_doing(scripted: Controller) -> None:
    link = UnitLink(scripted.address, None)
    assert "new" in repr(link)
    link.open(add_unit(), refuse)
    assert "registered" in repr(link)
    link.close()
    assert "ended" in repr(link)
