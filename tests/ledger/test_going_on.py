"""Sessions and units that were known to an earlier run of the service: they go on, or are told what was lost."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    DataPlaneError,
    InvalidRequestError,
    ProtocolVersionError,
    ServiceRestartedError,
    SessionExpiredError,
    StorageUnitError,
)
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import MIB, Driver, by_ids, commit_columns

EPOCH = 1_760_000_000_000_000_000
LATER = EPOCH + 1_000_000_000


def opening(nonce: str = "n", **more: Any) -> c.OpenSession:
    return c.OpenSession(nonce=nonce, host="h", name="a", **{"protocol_version": PROTOCOL_VERSION, **more})


def opened(ledger: Ledger, item: c.OpenSession) -> c.Opened:
    (output,) = ledger.apply(item)
    assert isinstance(output, c.Opened)
    return output


def again(ledger: Ledger, epoch: int) -> Ledger:
    """The ledger in its next run."""
    made = Ledger.restored(ledger.image())
    made.apply(c.Restarted(epoch=epoch, reserve_fraction=0.1, heartbeat_s=2.0, session_timeout_s=20.0))
    return made


def refused(ledger: Ledger, item: c.OpenSession) -> DataPlaneError:
    answer = opened(ledger, item)
    assert answer.session == 0
    assert answer.error is not None
    return answer.error


def test_a_session_goes_on_in_a_later_run_under_its_number() -> None:
    ledger = Ledger(EPOCH)
    first = opened(ledger, opening())
    ledger = again(ledger, LATER)
    back = opened(ledger, opening(session=first.session, epoch=EPOCH))
    assert (back.session, back.epoch, back.error) == (first.session, LATER, None)
    assert opened(ledger, opening(session=first.session, epoch=LATER)).session == first.session
    assert opened(ledger, opening("other")).session > first.session


def test_a_session_of_a_lost_state_is_told_both_epochs_and_what_is_lost() -> None:
    session = opened(Ledger(EPOCH), opening()).session
    error = refused(Ledger(LATER), opening(session=session, epoch=EPOCH))
    assert isinstance(error, ServiceRestartedError)
    assert (error.expected_epoch, error.got_epoch) == (EPOCH, LATER)
    assert f"lost: session {session}, and every partition, sample and claim" in str(error)


def test_a_session_of_a_lost_state_stays_lost_in_that_states_next_run() -> None:
    ledger = again(Ledger(LATER), LATER + 1)
    assert isinstance(refused(ledger, opening(session=5, epoch=EPOCH)), ServiceRestartedError)


def test_a_session_that_ended_is_not_opened_anew_by_going_on() -> None:
    driver = Driver()
    client = driver.client("a")
    nonce = next(item.nonce for item in driver.log if isinstance(item, c.OpenSession))
    client.do(c.Bye())
    error = refused(driver.ledger, opening(nonce, session=client.session, epoch=7))
    assert isinstance(error, SessionExpiredError)
    assert error.session == client.session


def test_an_older_service_does_not_take_a_session_of_a_later_run() -> None:
    ledger = Ledger(EPOCH)
    session = opened(ledger, opening()).session
    error = refused(ledger, opening(session=session, epoch=LATER))
    assert isinstance(error, ServiceRestartedError)
    assert (error.expected_epoch, error.got_epoch) == (LATER, EPOCH)
    assert error.lost == f"the latest changes of session {session}"


def test_going_on_is_refused_to_another_protocol_version() -> None:
    error = refused(Ledger(LATER), opening(session=5, epoch=EPOCH, protocol_version=99))
    assert isinstance(error, ProtocolVersionError)


def test_session_numbers_are_never_those_of_an_earlier_state() -> None:
    """So that a call of a lost session is not executed as another's."""
    early, late = Ledger(EPOCH), Ledger(LATER)
    numbers = [opened(early, opening(f"{i}")).session for i in range(1000)]
    assert max(numbers) < opened(late, opening()).session
    (answer,) = late.apply(c.Call(session=numbers[0], number=1, watermark=1, command=c.Units()))
    assert isinstance(answer, c.Answer)
    assert isinstance(answer.result, SessionExpiredError)


def test_session_numbers_whose_opening_the_log_lost_are_not_given_again() -> None:
    ledger = Ledger(EPOCH)
    image = ledger.image()
    lost = opened(ledger, opening()).session
    made = Ledger.restored(image)
    made.apply(c.Restarted(epoch=LATER, reserve_fraction=0.1, heartbeat_s=2.0, session_timeout_s=20.0))
    assert opened(made, opening("other")).session > lost


# --- units


def offer(driver: Driver, **more: Any) -> c.UnitAdded:
    facts: dict[str, Any] = {
        "name": "unit0",
        "host": "here",
        "epoch": 1,
        "cookie": "cookie-unit0",
        "capacity_bytes": MIB,
        "backed_bytes": MIB,
        "endpoints": (),
        "arena_path": "/arena",
    }
    added = driver.apply(c.AddUnit(**{**facts, **more}))[0]
    assert isinstance(added, c.UnitAdded)
    return added


def test_a_unit_that_a_lost_state_knew_is_told_to_start_over() -> None:
    error = offer(Driver(units=0), unit=3).error
    assert isinstance(error, ServiceRestartedError)
    assert error.got_epoch == 7
    assert "storage unit 3 (unit0) and its rows" in error.lost


def test_a_unit_comes_back_before_its_end_was_noticed() -> None:
    driver = Driver()
    assert isinstance(offer(driver).error, InvalidRequestError)
    assert isinstance(offer(driver, unit=2).error, InvalidRequestError)
    added = offer(driver, unit=1)
    assert (added.unit, added.error) == (1, None)


def test_a_put_under_way_is_committed_though_its_unit_is_not_back_yet() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    client.register()
    reservations = [client.post(client.allocate({"x": [64]})) for _ in range(2)]
    driver.ledger = again(driver.ledger, 8)

    def commit(name: str, reservation: int) -> c.Commit:
        columns = commit_columns({"x": [64]})
        return c.Commit(
            partition="p", samples=by_ids(name), mode=c.Mode.CREATE, reservation=reservation, columns=columns
        )

    client.call(c.Committed, commit("a", reservations[0]))
    assert offer(driver, unit=1, host="here").error is None
    driver.apply(c.UnitLost(unit=1))
    with pytest.raises(StorageUnitError, match="its connection to the controller is lost"):
        client.raise_(commit("b", reservations[1]))


@pytest.mark.parametrize("more", [{"capacity_bytes": 2 * MIB}, {"backed_bytes": 0}, {"epoch": 0}], ids=str)
def test_a_unit_comes_back_with_the_arena_it_had(more: dict[str, Any]) -> None:
    assert isinstance(offer(Driver(), unit=1, **more).error, InvalidRequestError)
