"""What a client's session remembers is bounded."""

from __future__ import annotations

from dataplane.client.session_state import Pins, Schemas
from dataplane.core.types import FieldSpec


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
