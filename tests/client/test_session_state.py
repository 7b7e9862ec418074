"""What a client's session remembers is bounded."""

from __future__ import annotations

import pytest

from dataplane.client.session_state import Pins, Schemas, SessionState
from dataplane.config import DataPlaneConfig
from dataplane.core.types import FieldSpec
from dataplane.ledger.commands import Abort, Command, Release


def test_schemas_of_partitions_that_are_not_put_into_are_forgotten() -> None:
    schemas = Schemas(3)
    for name in ("a", "b", "c"):
        schemas.remember(name, {name: FieldSpec("jagged")})
    assert schemas.get("a") == {"a": FieldSpec("jagged")}
    schemas.remember("d", {})
    assert [schemas.get(name) is not None for name in ("a", "b", "c", "d")] == [True, False, True, True]
    schemas.forget("a")
    schemas.forget("nobody's")
    assert len(schemas) == 2


def test_a_pin_is_dropped_once_nothing_refers_to_it() -> None:
    pins = Pins()
    one, other = pins.take(1, None), pins.take(2, None)
    assert list(pins.dropped()) == []
    del other
    assert list(pins.dropped()) == [2]
    assert list(pins.dropped()) == []
    del one
    assert list(pins.dropped()) == [1]


def test_leftovers_that_an_interrupt_kept_from_being_posted_come_again() -> None:
    session_state = SessionState(DataPlaneConfig(address="nowhere:1"), session=1, lock=None)
    session_state.pin(5)
    session_state.preallocated.give_up(6)
    posted: list[int] = []

    def post(command: Command) -> None:
        assert isinstance(command, Release | Abort)
        posted.append(command.located if isinstance(command, Release) else command.reservation)
        if len(posted) in (1, 3):
            raise KeyboardInterrupt

    def post_leftovers() -> None:
        for command in session_state.leftovers():
            post(command)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            post_leftovers()
    post_leftovers()
    assert posted == [5, 5, 6, 6]
    post_leftovers()
    assert len(posted) == 4
    session_state.close()
