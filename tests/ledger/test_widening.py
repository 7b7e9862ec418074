"""Random puts of several kinds into one field: each sample keeps its value, and the field has the widest kind of its
rows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.schema import field_of
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import SchemaError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids
from tests.ledger.fingerprint import fingerprint

SPECS = {
    "numbers": FieldSpec(FieldKind.OBJECT, "float16"),
    "integers": FieldSpec(FieldKind.OBJECT, "uint8"),
    "words": FieldSpec(FieldKind.OBJECT),
    "scalar": FieldSpec(FieldKind.DENSE, "float32", ()),
    "dense": FieldSpec(FieldKind.DENSE, "float32", (4,)),
    "jagged": FieldSpec(FieldKind.JAGGED, "float32", ()),
    "ragged": FieldSpec(FieldKind.RAGGED, "float32"),
    "other": FieldSpec(FieldKind.RAGGED, "int8"),
}
RANK = {FieldKind.OBJECT: 0, FieldKind.DENSE: 1, FieldKind.JAGGED: 1, FieldKind.RAGGED: 2}
IDS = ("a", "b", "c", "d")

ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=3, unique=True)
steps = st.lists(
    st.tuples(st.just("put"), ids, st.sampled_from(list(SPECS)), st.integers(1, 9))
    | st.tuples(st.just("clear"), ids, st.none(), st.none()),
    min_size=1,
    max_size=14,
)
Model = dict[str, tuple[FieldSpec, int]]
"""By sample: the spec and the length of its value."""


def spec_now(client: Client) -> FieldSpec:
    return client.call(c.Described, c.Describe(partition="p")).fields.get("x", FieldSpec())


def put(client: Client, model: Model, names: list[str], spec: FieldSpec, length: int) -> None:
    """Put a value for each sample. Refused exactly if the field's kind neither accepts nor can become the value's."""
    before = spec_now(client)
    fits = not model or before.accepts(spec) or before.widens_to(spec)
    lengths = [1 if spec.kind is FieldKind.DENSE else length] * len(names)
    try:
        client.put(names, {"x": lengths}, spec=spec)
    except SchemaError:
        assert not fits
        return
    assert fits
    model.update(dict.fromkeys(names, (spec, lengths[0])))


def check(client: Client, model: Model) -> None:
    """Each sample has its value in one column, whose kind is that of the value; and no bytes are lost."""
    listed = client.call(c.Listed, c.List(partition="p"))
    assert set(listed.ids) == set(model)
    if not model:
        assert client.used() == 0
        return
    call_id = client.post(c.Locate(partition="p", samples=by_ids(*listed.ids), fields=("x",)))
    found = client.result(call_id)
    assert isinstance(found, c.Located)
    client.do(c.Release(located=call_id))
    spec = spec_now(client)
    assert RANK[spec.kind or FieldKind.OBJECT] == max(RANK[each.kind or FieldKind.OBJECT] for each, _ in model.values())
    assert found.fields[0].spec == spec
    for row, name in enumerate(listed.ids):
        wanted, length = model[name]
        (column,) = [each for each in found.fields if each.lengths[row] >= 0]
        assert field_of(column.name) == "x"
        assert column.spec.kind is wanted.kind
        assert int(column.lengths[row]) == length
    [part] = client.stats().partitions
    assert part.produced == {"x": len(model)}


@settings(deadline=None)
@given(steps, st.sampled_from([{}, {"x": FieldSpec()}]))
def test_random_puts_of_several_kinds(
    history: list[tuple[str, list[str], str, int]], fields: dict[str, FieldSpec]
) -> None:
    driver = Driver()
    client = driver.client()
    client.register(specs=fields)
    model: Model = {}
    for what, names, spec, length in history:
        if what == "put":
            put(client, model, names, SPECS[spec], length)
        else:
            client.clear(*names)
            for name in names:
                model.pop(name, None)
        check(client, model)
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
    assert fingerprint(Ledger.restored(driver.ledger.image())) == fingerprint(driver.ledger)
