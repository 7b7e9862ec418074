"""Commit: everything is checked before anything changes, and a failed one frees its space."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import (
    DataPlaneError,
    FieldNotFoundError,
    FieldNotProducedError,
    InvalidRequestError,
    LimitError,
    PartitionDroppedError,
    PartitionNotFoundError,
    PartitionSealedError,
    SampleNotFoundError,
    SchemaError,
    ServiceRestartedError,
    StaleSchemaError,
    StorageUnitError,
)
from dataplane.ledger import commands as c
from tests.ledger.driver import BYTES, MIB, Client, Driver, by_ids, commit_columns

WORDS = FieldSpec(FieldKind.JAGGED, "int64", ())
PAIRS = FieldSpec(FieldKind.DENSE, "float32", (2,))


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client()
    client.register()
    client.put(["old"], {"x": [8]}, tags={"n": [1]})
    return client


def commit(reservation: int | None, **more: Any) -> c.Commit:
    base: dict[str, Any] = {
        "partition": "p",
        "samples": by_ids("a", "old"),
        "mode": c.Mode.UPSERT,
        "columns": commit_columns({"x": [8, 8], "y": [4, 4]}),
    }
    return c.Commit(reservation=reservation, **{**base, **more})


def reserve(client: Client) -> int:
    return client.post(client.allocate({"x": [8, 8], "y": [4, 4]}))


BAD: dict[str, tuple[type[DataPlaneError], dict[str, Any]]] = {
    "unknown partition": (PartitionNotFoundError, {"partition": "none"}),
    "duplicate ids": (InvalidRequestError, {"samples": by_ids("a", "a")}),
    "too few samples": (InvalidRequestError, {"samples": by_ids("a")}),
    "empty id": (InvalidRequestError, {"samples": by_ids("", "b")}),
    "long id": (LimitError, {"samples": by_ids("a" * 2000, "b")}),
    "missing under update": (SampleNotFoundError, {"mode": c.Mode.UPDATE}),
    "existing under create": (DataPlaneError, {"mode": c.Mode.CREATE}),
    "other columns": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "z": [4, 4]})}),
    "fewer columns": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8]})}),
    "other lengths": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "y": [4, 5]})}),
    "length beyond sense": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "y": [4, 1 << 62]})}),
    "negative length": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "y": [4, -4]})}),
    "other dtype": (SchemaError, {"columns": commit_columns({"x": [1, 1], "y": [4, 4]}, spec=WORDS)}),
    "open spec": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "y": [4, 4]}, spec=FieldSpec())}),
    "index outside": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "y": [4, 4]}, index=[0, 2])}),
    "index too short": (InvalidRequestError, {"columns": commit_columns({"x": [8, 8], "y": [4, 4]}, index=[0])}),
    "tag count": (InvalidRequestError, {"tags": (c.TagColumn(name="n", values=(1,)),)}),
    "tag type": (InvalidRequestError, {"tags": (c.TagColumn(name="n", values=(1, [])),)}),  # type: ignore[arg-type]
    "tag position": (
        InvalidRequestError,
        {"tags": (c.TagColumn(name="n", values=(1,), positions=np.array([2])),)},
    ),
    "tag too long": (DataPlaneError, {"tags": (c.TagColumn(name="n", values=("x" * 100_000, "")),)}),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_a_fault_changes_nothing_and_frees_the_reservation(driver: Driver, client: Client, case: str) -> None:
    error, changes = BAD[case]
    before = client.used()
    number = reserve(client)
    with pytest.raises(error):
        client.raise_(commit(number, **changes))
    assert client.used() == before
    listed = client.call(c.Listed, c.List(partition="p"))
    assert listed.ids == ("old",)
    assert listed.fields == ("x",)
    assert listed.tags[0].values == (1,)
    assert set(client.call(c.Described, c.Describe(partition="p")).fields) == {"x"}
    with pytest.raises(InvalidRequestError, match="no reservation"):
        client.raise_(commit(number))


def by_schema(number: int) -> c.Commit:
    columns = tuple(msgspec.structs.replace(column, by_schema=True) for column in commit_columns({"x": [8]}))
    return c.Commit(partition="p", samples=by_ids("a"), mode=c.Mode.UPSERT, reservation=number, columns=columns)


def opened(client: Client, how: str) -> None:
    """The kind of field x is open again."""
    client.clear("old")
    if how == "registration":
        client.register()


@pytest.mark.parametrize("how", ["last row", "registration"])
def test_a_kind_taken_from_a_schema_that_no_longer_names_it_is_refused(client: Client, how: str) -> None:
    before = client.used()
    number = client.post(client.allocate({"x": [8]}))
    opened(client, how)
    with pytest.raises(StaleSchemaError, match="'x'"):
        client.raise_(by_schema(number))
    assert client.used() == before - 64
    wanted = (c.ColumnSizes(name="x", sizes=np.array([8]), by_schema=True),)
    with pytest.raises(StaleSchemaError, match="'x'"):
        client.raise_(c.Allocate(partition="p", columns=wanted))
    client.put(["a"], {"x": [8]})
    client.call(c.Committed, by_schema(client.post(client.allocate({"x": [8]}))))


def test_a_kind_that_a_later_schema_names_again_is_taken(client: Client) -> None:
    number = client.post(client.allocate({"x": [8]}))
    client.clear("old")
    client.register(specs={"x": BYTES})
    client.call(c.Committed, by_schema(number))


def test_a_commit_is_visible_whole(client: Client) -> None:
    made = client.call(c.Committed, commit(reserve(client)))
    found = client.locate(by_ids("a", "old"), ["x", "y"])
    assert found.generations.tolist() == made.generations.tolist()


def test_columns_without_a_reservation_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="requires a reservation"):
        client.raise_(commit(None))


def test_another_sessions_reservation_is_out_of_reach(driver: Driver, client: Client) -> None:
    number = reserve(client)
    with pytest.raises(InvalidRequestError, match="no reservation"):
        driver.client().raise_(commit(number))


def test_sealed_partitions_take_updates_only(client: Client) -> None:
    client.do(c.Seal(partition="p"))
    before = client.used()
    with pytest.raises(PartitionSealedError, match="'a'"):
        client.raise_(commit(reserve(client)))
    assert client.used() == before
    client.put(["old"], {"x": [9]})
    client.register()
    client.put(["a"], {"x": [9]})


def test_a_partition_dropped_under_a_put(client: Client) -> None:
    number = reserve(client)
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    client.register()
    with pytest.raises(PartitionDroppedError):
        client.raise_(commit(number))
    assert client.used() == 0


def test_strict_partitions_refuse_undeclared_fields(client: Client) -> None:
    client.register(strict=True, fields=["x"])
    with pytest.raises(SchemaError, match="undeclared"):
        client.put(["old"], {"y": [1]})
    client.put(["old"], {"x": [1]})
    client.register(fields=["x"])
    client.put(["old"], {"y": [1]})


def test_a_spec_settles_and_opens_again_with_the_last_live_cell(client: Client) -> None:
    with pytest.raises(SchemaError, match="jagged int64"):
        client.put(["b"], {"x": [1]}, spec=WORDS)
    client.clear("old")
    client.put(["b"], {"x": [1]}, spec=WORDS)
    described = client.call(c.Described, c.Describe(partition="p")).fields
    assert described["x"] == WORDS


def test_a_declared_spec_holds_when_no_row_lives(client: Client) -> None:
    client.register(specs={"d": PAIRS, "k": FieldSpec(FieldKind.JAGGED)})
    with pytest.raises(SchemaError):
        client.put(["a"], {"d": [8]}, spec=BYTES)
    client.put(["a"], {"d": [1]}, spec=PAIRS)
    with pytest.raises(SchemaError):
        client.put(["a"], {"k": [1]}, spec=PAIRS)
    client.put(["a"], {"k": [1]}, spec=WORDS)
    with pytest.raises(SchemaError, match="declaration"):
        client.register(specs={"k": BYTES})


def test_dense_rows_have_length_one(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="length 1"):
        client.put(["a"], {"d": [2]}, spec=PAIRS)


def test_a_new_register_keeps_live_fields_and_forgets_dead_ones(client: Client) -> None:
    client.put(["b"], {"dead": [1]})
    client.clear("b")
    client.register(fields=["new"])
    assert set(client.call(c.Described, c.Describe(partition="p")).fields) == {"new", "x"}


def test_a_unit_that_restarted_or_went_refuses_what_was_reserved_there(driver: Driver, client: Client) -> None:
    first, second, third = reserve(client), reserve(client), reserve(client)
    driver.apply(c.UnitLost(unit=1))
    with pytest.raises(StorageUnitError):
        client.raise_(commit(first))
    driver.add_unit(name="unit0", capacity=MIB)
    client.call(c.Committed, commit(second))
    driver.add_unit(name="unit0", capacity=MIB, epoch=2)
    with pytest.raises(ServiceRestartedError):
        client.raise_(commit(third))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert client.used() == 0


def test_reads_name_what_is_missing(client: Client) -> None:
    client.put(["b"])
    for fields, ids, error in (
        (("none",), ("old",), FieldNotFoundError),
        (("x",), ("old", "nobody"), SampleNotFoundError),
        (("x",), ("old", "b"), FieldNotProducedError),
    ):
        with pytest.raises(error) as caught:
            client.locate(by_ids(*ids), fields)
        if error is not FieldNotFoundError:
            assert caught.value.positions == [1]
    assert client.stats().sessions[0].pins == 0


def test_parts_list_the_fields_of_each_put(client: Client) -> None:
    client.put(["old", "a"], {"y": [4, 4]})
    listing = commit(None, columns=(), samples=by_ids("a", "old", "b"), listed=True, parts=(1, 1, 1))
    got = client.call(c.Committed, listing)
    assert [part.names for part in got.part_fields] == [("y",), ("x", "y"), ()]
    assert got.fields == ()
    assert client.call(c.Committed, msgspec.structs.replace(listing, listed=False)).part_fields == ()


@pytest.mark.parametrize("parts", [(1,), (1, 1, 1), (3, -1), (0,)])
def test_parts_have_the_samples_of_the_commit(client: Client, parts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="a commit of 2 samples has parts of"):
        client.call(c.Committed, commit(reserve(client), parts=parts))
    assert client.call(c.Listed, c.List(partition="p")).ids == ("old",)
