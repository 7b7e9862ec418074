"""What a client's session remembers is bounded."""

from __future__ import annotations

from dataplane.desk import Schemas
from dataplane.types import FieldSpec


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
