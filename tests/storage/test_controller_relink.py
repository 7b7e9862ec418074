"""A storage unit's link that broke: how it is made again, what it says then, and when it is not made again."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.errors import ArenaSpaceError, InvalidRequestError, ServiceRestartedError
from dataplane.ledger import commands as c
from dataplane.storage import controller_link
from dataplane.storage.controller_link import UnitLink
from tests.controller.service import ScriptedLedger, add_unit
from tests.logs import logged
from tests.ports import free_ports
from tests.restarts import Proxy, wait_until

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig()
WAIT_S = 60.0


def ignore(order: c.UnitOrder) -> None:
    pass


class Scene:
    """A controller behind a network that can be cut, so that it can be away and come back in another run."""

    def __init__(self) -> None:
        self.ledger = ScriptedLedger()
        port = free_ports(2)  # which nobody is given while no controller has it
        self.config = replace(CONFIG, port=port)
        self.controller = Controller(self.config, ledger=self.ledger, epoch=1).start()
        self.proxy = Proxy(port)
        self.links: list[UnitLink] = []

    def link(self, reconnect_s: float = 60.0, timeout_s: float = 10.0) -> UnitLink:
        address = f"127.0.0.1:{self.proxy.port}"
        self.links.append(UnitLink(address, None, reconnect_s=reconnect_s, timeout_s=timeout_s))
        return self.links[-1]

    def live_again(self, ledger: ScriptedLedger) -> ScriptedLedger:
        """Another run of the controller, with another ledger."""
        self.controller.stop()
        self.ledger = ledger
        self.controller = Controller(self.config, ledger=ledger, epoch=2).start()
        return ledger

    def close(self) -> None:
        self.proxy.heal()
        for link in self.links:
            link.close()
        self.proxy.close()
        self.controller.stop()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


class Forgetful(ScriptedLedger):
    """A service that has forgotten all units: it rejects an offer with a unit id."""

    def apply(self, item: c.Input) -> list[c.Output]:
        outputs = super().apply(item)
        if isinstance(item, c.AddUnit) and item.unit:
            error = ServiceRestartedError(expected_epoch=1, got_epoch=2, what="the service", lost="the unit")
            return [c.UnitAdded(cookie=item.cookie, error=error)]
        return outputs


def gone(session: int) -> c.SessionGone:
    return c.SessionGone(unit=1, session=session)


def attached(session: int) -> c.SessionAttached:
    return c.SessionAttached(unit=1, session=session, lock_path=f"/lock/{session}")


def told(ledger: ScriptedLedger) -> list[c.Input]:
    """What units told, from the last AddUnit on."""
    inputs = [item for item in ledger.of(c.Input) if not isinstance(item, c.UnitLost)]
    adds = [place for place, item in enumerate(inputs) if isinstance(item, c.AddUnit)]
    return inputs[adds[-1] :]


def test_it_is_made_again_and_says_what_it_had_to_say_in_order(scene: Scene) -> None:
    link, orders = scene.link(), queue.SimpleQueue[c.UnitOrder]()
    added: list[int] = []
    link.open(add_unit(), orders.put, on_added=added.append)
    link.report(attached(1))
    link.report(attached(2))
    link.report(attached(3))
    link.report(gone(2))
    scene.ledger.wait_for(c.SessionGone)
    wait_until(lambda: not link._reports, "the link need not say again what has arrived")
    with logged("Connection to the controller at"):
        scene.proxy.cut()
    scene.ledger.wait_for(c.UnitLost)
    link.report(c.SessionAlive(unit=1, session=9))  # the broken stream may take it, if its end was not noticed yet
    link.report(c.Grown(unit=1, backed_bytes=3 << 20))
    link.report(gone(1))
    for session in range(10, 20):
        link.report(c.SessionAlive(unit=1, session=session))
    ledger = scene.live_again(ScriptedLedger())
    scene.proxy.heal()
    ledger.wait_until(lambda: any(isinstance(item, c.SessionAlive) and item.session == 19 for item in ledger.inputs))
    expected = [
        msgspec.structs.replace(add_unit(), unit=1, backed_bytes=3 << 20),
        attached(3),
        c.Grown(unit=1, backed_bytes=3 << 20),
        gone(1),
        *[c.SessionAlive(unit=1, session=session) for session in range(10, 20)],
    ]
    found = [item for item in told(ledger) if not (isinstance(item, c.SessionAlive) and item.session == 9)]
    assert [msgspec.to_builtins(item) for item in found] == [msgspec.to_builtins(item) for item in expected]
    wait_until(lambda: added == [1, 1], "the link hears that the unit was added once more")
    assert not link.lost.is_set()


def test_orders_come_through_the_new_link(scene: Scene) -> None:
    link, orders = scene.link(), queue.SimpleQueue[c.UnitOrder]()
    link.open(add_unit(), orders.put)
    apply = scene.ledger.apply

    def ordering(item: c.Input) -> list[c.Output]:
        more = [c.GrowArena(unit=1, backed_bytes=9)] if isinstance(item, c.SessionAlive) else []
        return [*apply(item), *more]

    scene.ledger.apply = ordering  # type: ignore[method-assign]
    for _ in range(3):
        with logged("Connection to the controller at"):  # else the broken stream may take what is reported next
            scene.proxy.cut()
        scene.proxy.heal()
        link.report(c.SessionAlive(unit=1, session=1))
        order = orders.get(timeout=WAIT_S)
        assert isinstance(order, c.GrowArena)
        # What broke off with a link may have been said twice.
        wait_until(lambda: len(scene.ledger.of(c.AddUnit)) > len(scene.ledger.of(c.UnitLost)))
        while not orders.empty():
            orders.get()


def test_a_controller_that_knows_nothing_of_it_gets_it_anew(scene: Scene) -> None:
    link = scene.link()
    added: list[int] = []

    def start_over() -> c.AddUnit:
        link.report(gone(7))  # the last of its run before
        return add_unit("another cookie")

    link.open(add_unit(), ignore, on_added=added.append, start_over=start_over)
    link.report(attached(1))
    scene.ledger.wait_for(c.SessionAttached)
    ledger = scene.live_again(Forgetful())
    wait_until(lambda: len(added) == 2)
    link.report(c.SessionAlive(unit=1, session=8))
    ledger.wait_for(c.SessionAlive)
    assert [(add.cookie, add.unit) for add in ledger.of(c.AddUnit)] == [("cookie", 1), ("another cookie", 0)]
    assert [type(item) for item in told(ledger)] == [c.AddUnit, c.SessionAlive]


def test_it_may_start_over_when_it_is_opened(scene: Scene) -> None:
    ledger = scene.live_again(Forgetful())
    link = scene.link()
    kept = msgspec.structs.replace(add_unit(), unit=4)
    with pytest.raises(ServiceRestartedError):
        scene.link().open(kept, ignore)
    assert link.open(kept, ignore, start_over=lambda: add_unit("another cookie")) == 1
    assert ledger.of(c.AddUnit)[-1].cookie == "another cookie"


def test_it_is_lost_when_it_cannot_start_over(scene: Scene) -> None:
    def full() -> c.AddUnit:
        raise ArenaSpaceError(directory="/dev/shm", found_bytes=1, wanted_bytes=2)

    links = [scene.link(), scene.link()]
    for link, start_over in zip(links, (None, full), strict=True):
        link.open(add_unit(), ignore, start_over=start_over)
    scene.live_again(Forgetful())
    for link in links:
        assert link.lost.wait(WAIT_S)


def test_it_is_lost_when_the_time_is_over(scene: Scene) -> None:
    link, patient = scene.link(reconnect_s=0.2), scene.link()
    link.open(add_unit(), ignore)
    patient.open(add_unit(), ignore)
    scene.proxy.cut()
    assert link.lost.wait(WAIT_S)
    link.report(gone(1))
    assert not patient.lost.is_set()


def test_a_refusal_that_stands_is_not_tried_again(scene: Scene) -> None:
    class Refusing(ScriptedLedger):
        def apply(self, item: c.Input) -> list[c.Output]:
            outputs = super().apply(item)
            if isinstance(item, c.AddUnit):
                return [c.UnitAdded(cookie=item.cookie, error=InvalidRequestError("a smaller arena"))]
            return outputs

    link = scene.link()
    link.open(add_unit(), ignore)
    ledger = scene.live_again(Refusing())
    assert link.lost.wait(WAIT_S)
    assert len(ledger.of(c.AddUnit)) == 1


@pytest.mark.parametrize("failure", ["cut", "pause"])
def test_closing_a_broken_link_is_quick(
    scene: Scene, caplog: pytest.LogCaptureFixture, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_link, "CLOSE_S", WAIT_S)
    tries: list[str] = []
    waits, reach = threading.Event(), controller_link.reach

    def trying(address: str, token: str | None, deadline: float, check: Callable[[], None]) -> str:
        tries.append(address)
        looks = itertools.count()

        def look() -> None:
            if next(looks) == 5:  # one that is refused ends before
                waits.set()
            check()

        return reach(address, token, deadline, look)

    monkeypatch.setattr(controller_link, "reach", trying)
    link = scene.link(timeout_s=10 * WAIT_S)
    link.open(add_unit(), ignore)
    scene.proxy.cut()
    if failure == "pause":
        wait_until(lambda: len(tries) > 1)
        waits.clear()
        scene.proxy.pause()
        assert waits.wait(WAIT_S)
    link.close()
    assert link.lost.is_set()
    assert "did not close" not in caplog.text
