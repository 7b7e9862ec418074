"""Commit: everything is checked before anything changes, and a failed one frees its space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.core.types import PROTOCOL_VERSION, Checksums, FieldKind, FieldSpec
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
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.state.extents import Extents, Several
from dataplane.ledger.state.fields import Field, erase
from tests.ledger.driver import BYTES, MIB, Client, Driver, by_ids, commit_columns, handles
from tests.ledger.fingerprint import fingerprint
from tests.ledger.values import canonical

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
    call_id = reserve(client)
    with pytest.raises(error):
        client.raise_(commit(call_id, **changes))
    assert client.used() == before
    listed = client.call(c.Listed, c.List(partition="p"))
    assert listed.ids == ("old",)
    assert listed.fields == ("x",)
    assert listed.tags[0].values == (1,)
    assert set(client.call(c.Described, c.Describe(partition="p")).fields) == {"x"}
    with pytest.raises(InvalidRequestError, match="no reservation"):
        client.raise_(commit(call_id))


def by_schema(call_id: int) -> c.Commit:
    columns = tuple(msgspec.structs.replace(column, by_schema=True) for column in commit_columns({"x": [8]}))
    return c.Commit(partition="p", samples=by_ids("a"), mode=c.Mode.UPSERT, reservation=call_id, columns=columns)


def opened(client: Client, how: str) -> None:
    """The kind of field x is open again."""
    client.clear("old")
    if how == "registration":
        client.register()


@pytest.mark.parametrize("how", ["last row", "registration"])
def test_a_kind_taken_from_a_schema_that_no_longer_names_it_is_refused(client: Client, how: str) -> None:
    before = client.used()
    call_id = client.post(client.allocate({"x": [8]}))
    opened(client, how)
    with pytest.raises(StaleSchemaError, match="'x'"):
        client.raise_(by_schema(call_id))
    assert client.used() == before - 64
    wanted = (c.ColumnSizes(name="x", sizes=np.array([8]), by_schema=True),)
    with pytest.raises(StaleSchemaError, match="'x'"):
        client.raise_(c.Allocate(partition="p", columns=wanted))
    client.put(["a"], {"x": [8]})
    client.call(c.Committed, by_schema(client.post(client.allocate({"x": [8]}))))


def test_a_kind_that_a_later_schema_names_again_is_taken(client: Client) -> None:
    call_id = client.post(client.allocate({"x": [8]}))
    client.clear("old")
    client.register(specs={"x": BYTES})
    client.call(c.Committed, by_schema(call_id))


def test_columns_without_a_reservation_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="requires a reservation"):
        client.raise_(commit(None))


def test_another_sessions_reservation_is_out_of_reach(driver: Driver, client: Client) -> None:
    call_id = reserve(client)
    with pytest.raises(InvalidRequestError, match="no reservation"):
        driver.client().raise_(commit(call_id))


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
    call_id = reserve(client)
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    client.register()
    with pytest.raises(PartitionDroppedError):
        client.raise_(commit(call_id))
    assert client.used() == 0


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


# --- Stored bytes: sharing, versions, trimming, pins; nothing in use is ever free.


@pytest.fixture
def writer() -> Client:
    writer = Driver().client()
    writer.register()
    return writer


def test_an_extent_gives_its_dead_granules_back_when_less_than_half_is_live(writer: Client) -> None:
    ids = [f"s{i}" for i in range(8)]
    writer.put(ids, {"x": [100] * 8})
    assert writer.used() == 832
    writer.clear("s0", "s1", "s2", "s3")
    assert writer.used() == 832
    writer.clear("s4")
    # Left: [500, 800), which touches the granules [448, 832).
    assert writer.used() == 384
    writer.clear("s6")
    assert writer.used() == 384
    writer.clear("s7")
    # Left: [500, 600), granules [448, 640).
    assert writer.used() == 192
    assert writer.locate(by_ids("s5")).fields[0].offsets.tolist() == [500]
    writer.do(c.Release(located=writer.last_call_id))
    writer.clear("s5")
    assert writer.used() == 0
    assert writer.driver.ledger.free_ranges(1) == [(0, 1 << 20)]


def test_a_pinned_extent_is_trimmed_when_its_reader_has_gone(writer: Client) -> None:
    writer.put(["a", "b", "c"], {"x": [64, 64, 64]})
    writer.locate(by_ids("b"))
    located = writer.last_call_id
    writer.clear("a", "b")
    assert writer.used() == 192
    writer.do(c.Release(located=located))
    assert writer.used() == 64
    writer.do(c.Release(located=located))
    assert writer.used() == 64


def test_shared_values_live_as_long_as_any_row_points_at_them(writer: Client) -> None:
    writer.put(["a", "b", "c", "d"], {"x": [64, 128]}, index=[0, 0, 1, 1])
    assert writer.used() == 192
    found = writer.locate(by_ids("a", "b", "c", "d")).fields[0]
    assert found.offsets.tolist() == [0, 0, 64, 64]
    assert found.lengths.tolist() == [64, 64, 128, 128]
    writer.do(c.Release(located=writer.last_call_id))
    writer.clear("c")
    assert writer.used() == 192
    writer.clear("d")
    # Two of six granules' worth of cells are left: the second value goes.
    assert writer.used() == 64
    writer.clear("a")
    assert writer.used() == 64
    writer.clear("b")
    assert writer.used() == 0


def test_values_nobody_points_at_are_freed_with_their_extent(writer: Client) -> None:
    writer.put(["a"], {"x": [64, 64]}, index=[1])
    assert writer.locate(by_ids("a")).fields[0].offsets.tolist() == [64]
    writer.do(c.Release(located=writer.last_call_id))
    writer.clear("a")
    assert writer.used() == 0


def test_empty_values_take_no_space(writer: Client) -> None:
    writer.put(["a", "b"], {"x": [0, 0], "y": [0, 5]})
    assert writer.used() == 64
    found = writer.locate(by_ids("a", "b"), ["x", "y"])
    assert found.fields[0].lengths.tolist() == [0, 0]
    writer.do(c.Release(located=writer.last_call_id))
    writer.clear("a")
    writer.locate(by_ids("b"), ["x"])
    writer.clear("b")
    assert writer.used() == 0


def test_columns_of_one_put_lie_together_each_on_its_own_granules(writer: Client) -> None:
    call_id = writer.post(writer.allocate({"x": [10, 20], "y": [100], "z": [1]}))
    got = writer.result(call_id)
    assert isinstance(got, c.Allocated)
    assert [(p.column, p.first, p.last, p.offset) for p in got.placements] == [
        (0, 0, 2, 0),
        (1, 0, 1, 64),
        (2, 0, 1, 192),
    ]
    writer.do(c.Abort(reservation=call_id))
    assert writer.used() == 0


def test_rewriting_half_of_a_put_trims_it(writer: Client) -> None:
    made = writer.put(["a", "b", "c"], {"x": [64, 64, 64]})
    writer.put(["a", "b"], {"x": [64, 64]})
    assert writer.used() == 64 + 128
    found = writer.locate(handles(made)).fields[0].offsets.tolist()
    assert found[2] == 128
    assert sorted(found[:2]) == found[:2]


def test_neighbours_of_many_puts_come_back_as_one_range(writer: Client) -> None:
    for i in range(50):
        writer.put([f"s{i}"], {"x": [64], "y": [1]})
    writer.clear(*[f"s{i}" for i in range(0, 50, 2)])
    assert writer.used() == 25 * 128
    writer.clear(*[f"s{i}" for i in range(50)])
    assert writer.driver.ledger.free_ranges(1) == [(0, 1 << 20)]
    assert writer.driver.ledger.held_ranges() == []


def test_split_columns_count_every_piece() -> None:
    driver = Driver(capacity=1024, reserve_fraction=0.0)
    writer = driver.client()
    writer.register()
    for i in range(8):
        writer.put([f"s{i}"], {"x": [128]})
    writer.clear("s1", "s3", "s5", "s6")
    spec = FieldSpec(FieldKind.JAGGED, "int64", ())
    call_id = writer.post(writer.allocate({"w": [64, 64, 128, 128, 128]}))
    got = writer.result(call_id)
    assert isinstance(got, c.Allocated)
    assert [(p.first, p.last) for p in got.placements] == [(0, 3), (3, 4), (4, 5)]
    writer.call(
        c.Committed,
        c.Commit(
            partition="p",
            samples=by_ids("a", "b", "c", "d", "e"),
            mode=c.Mode.CREATE,
            reservation=call_id,
            columns=commit_columns({"w": [8, 8, 16, 16, 16]}, spec=spec),
        ),
    )
    found = writer.locate(by_ids("a", "b", "c", "d", "e"), ["w"]).fields[0]
    assert len(set(found.offsets.tolist())) == 5
    writer.do(c.Release(located=writer.last_call_id))
    writer.clear("b", "d")
    # The first piece keeps two of its three values; the one that held only "d" is free.
    assert writer.used() == 512 + 64 * 4 + 128
    writer.clear("a", "c", "e", "s0", "s2", "s4", "s7")
    assert writer.used() == 0


def test_freeing_twice_is_a_defect_that_is_noticed() -> None:
    driver = Driver()
    extents: Extents = driver.ledger._state.extents
    offset = extents.all_units[1].space.take(64)
    assert offset is not None
    extent_ids = np.array([extents.reserve(1, offset, 64)], np.int32)
    extents.free(extent_ids)
    extents.sizes[extent_ids] = 64
    with pytest.raises(AssertionError):
        extents.free(extent_ids)


def test_trimming_keeps_granules_that_two_rows_share() -> None:
    driver = Driver()
    extents: Extents = driver.ledger._state.extents
    field = Field(BYTES, 8)
    field.settle(BYTES)
    rows = np.arange(3)
    offset = extents.all_units[1].space.take(192)
    assert offset == 0
    extent_id = extents.reserve(1, 0, 192)
    lengths = np.array([96, 10, 80])
    field.write(rows, np.full(3, extent_id, np.int32), np.array([0, 96, 106]), lengths, None)
    account = extents.open_account()
    extents.adopt(extent_id, account)
    extents.add_cells(extent_id, 3, Several((field,), rows, 186), account)
    extents.release_cells(erase([field], np.array([0])), account)
    assert extents.ranges() == [(1, 64, 128)]
    extents.release_cells(erase([field], np.array([2])), account)
    assert extents.ranges() == [(1, 64, 64)]
    assert account.live_bytes == account.used_bytes == 64


# --- Which rows get checksums, what becomes of these, and who is to compare them.


def sums(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def granted(client: Client, nbytes: int = 8) -> bool:
    """Whether a put of the client is to have checksums."""
    return client.call(c.Allocated, client.allocate({"x": [nbytes]})).checksums


def put(
    client: Client,
    ids: Sequence[str],
    checksums: np.ndarray | None,
    *,
    index: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> c.Committed:
    sizes = list(lengths or [8] * (len(ids) if index is None else max(index) + 1))
    call_id = client.post(client.allocate({"x": sizes}))
    (column,) = commit_columns({"x": sizes}, index=index)
    column = c.CommitColumn(name="x", spec=column.spec, lengths=column.lengths, index=column.index, checksums=checksums)
    commit = c.Commit(partition="p", samples=by_ids(*ids), mode=c.Mode.UPSERT, reservation=call_id, columns=(column,))
    return client.call(c.Committed, commit)


def located(client: Client, *ids: str) -> list[int] | None:
    (found,) = client.locate(by_ids(*ids)).fields
    return None if found.checksums is None else found.checksums.tolist()


def ready(**settings: object) -> tuple[Driver, Client]:
    """A ledger, and a client that is remote to its unit."""
    driver = Driver(**settings)
    client = driver.client()
    client.register()
    return driver, client


def test_on_one_host_only_puts_that_travel_are_to_have_them() -> None:
    driver, remote = ready()
    local = driver.client(attach=[1])
    assert granted(remote)
    assert not granted(local)
    assert not local.call(c.Preallocated, c.Preallocate(unit=1, nbytes=64)).checksums


def test_a_client_that_has_not_copied_yet_counts_as_local_where_it_has_a_lock() -> None:
    driver, _ = ready()
    opening = c.OpenSession(
        nonce="n", host="here", name="n", protocol_version=PROTOCOL_VERSION, lock_path="/dev/shm/lock"
    )
    (opened,) = driver.apply(opening)
    assert isinstance(opened, c.Opened)
    assert not granted(Client(driver, opened.session))


def test_all_are_to_have_them_while_there_are_several_hosts() -> None:
    driver, _ = ready()
    local = driver.client(attach=[1])
    guest = driver.client(host="there")
    assert granted(local)
    assert local.call(c.Preallocated, c.Preallocate(unit=1, nbytes=64)).checksums
    guest.do(c.Bye())
    assert not granted(local)
    driver.add_unit(name="far", host="there")
    assert granted(local)
    driver.apply(c.DropUnit(unit=2))
    assert not granted(local)


@pytest.mark.parametrize(("policy", "wanted"), [(Checksums.ALWAYS, True), (Checksums.NEVER, False)])
def test_always_and_never(policy: Checksums, wanted: bool) -> None:
    driver, remote = ready(checksums=policy)
    local = driver.client(attach=[1])
    assert granted(remote) is granted(local) is wanted
    put(remote, ["a"], sums(7))
    assert (located(remote, "a") is not None) is (located(local, "a") is not None) is wanted


def test_who_maps_the_memory_is_not_to_compare() -> None:
    driver, remote = ready()
    local = driver.client(attach=[1])
    put(remote, ["a", "b"], sums(7, 8))
    assert located(remote, "b", "a") == [8, 7]
    assert located(local, "b", "a") is None
    driver.add_unit(name="second")
    call_id = remote.post(remote.allocate({"x": [8]}, unit_wish=2))
    columns = (with_checksums(commit_columns({"x": [8]})[0], sums(9)),)
    commit = c.Commit(partition="p", samples=by_ids("c"), mode=c.Mode.UPSERT, reservation=call_id, columns=columns)
    remote.call(c.Committed, commit)
    assert located(local, "c", "a") == [9, 7], "one of the rows is on a unit that it does not map"


def with_checksums(column: c.CommitColumn, checksums: np.ndarray) -> c.CommitColumn:
    return c.CommitColumn(name=column.name, spec=column.spec, lengths=column.lengths, checksums=checksums)


def test_who_builds_on_rows_is_always_to_compare() -> None:
    driver, remote = ready()
    local = driver.client(attach=[1])
    put(remote, ["a"], sums(7))
    locate = c.Locate(partition="p", samples=by_ids("b", "a"), fields=("x", "y"), missing_ok=True)
    x, y = local.call(c.Located, locate).fields
    assert (x.checksums is not None and x.checksums.tolist(), y.checksums) == ([0, 7], None)
    saved = local.post(c.Save(partitions=("p",)))
    read = local.call(c.SavedRows, c.ReadSaved(saved=saved, partition="p", first=0, last=1, fields=("x",)))
    assert read.fields[0].checksums is not None


def test_a_row_has_that_of_its_last_writer() -> None:
    _, client = ready()
    put(client, ["a", "b", "c"], sums(7, 8, 9))
    put(client, ["b"], None)
    assert located(client, "a", "b", "c") == [7, 0, 9]
    put(client, ["b"], sums(5))
    assert located(client, "a", "b", "c") == [7, 5, 9]
    client.clear("a")
    put(client, ["a"], None)
    assert located(client, "a", "b", "c") == [0, 5, 9]


def test_samples_that_share_a_value_have_its_checksum() -> None:
    _, client = ready()
    put(client, ["a", "b", "c"], sums(7, 8), index=[1, 0, 1])
    assert located(client, "a", "b", "c") == [8, 7, 8]


def test_there_is_one_for_each_value() -> None:
    _, client = ready()
    with pytest.raises(InvalidRequestError, match="1 checksums for 2 values"):
        put(client, ["a", "b"], sums(7))


def test_they_are_kept_where_the_partition_grows_and_through_images_and_replay() -> None:
    driver, client = ready()
    put(client, ["a", "b"], sums(7, 8))
    many = [f"s{i}" for i in range(500)]
    put(client, many, np.arange(1, 501, dtype=np.uint32))
    expected = client.locate(by_ids("a", "b", *many)).fields[0]
    made = Ledger.restored(driver.ledger.image())
    assert fingerprint(made) == fingerprint(driver.ledger) == fingerprint(driver.replay())
    locate = c.Locate(partition="p", samples=by_ids("a", "b", *many), fields=("x",))
    ask = c.Call(session=client.session, call_id=1000, watermark=1000, command=locate)
    (answer,) = made.apply(ask)
    assert isinstance(answer, c.Answer)
    assert isinstance(answer.result, c.Located)
    assert canonical(answer.result.fields[0]) == canonical(expected)


def test_an_image_of_a_version_without_them_is_read() -> None:
    driver, client = ready()
    put(client, ["a"], None)
    state = driver.ledger._state
    for old in (state, state.partitions["p"].fields["x"]):
        for name in ("checksums", "several_hosts"):
            vars(old).pop(name, None)
    made = Ledger.restored(driver.ledger.image())
    locate = c.Locate(partition="p", samples=by_ids("a"), fields=("x",))
    (answer,) = made.apply(c.Call(session=client.session, call_id=100, watermark=100, command=locate))
    assert isinstance(answer, c.Answer)
    assert isinstance(answer.result, c.Located)
    assert answer.result.fields[0].checksums is None


def test_without_them_nothing_is_kept() -> None:
    driver, client = ready()
    put(client, ["a"], None)
    field = driver.ledger._state.partitions["p"].fields["x"]
    assert field.checksums is None
    put(client, ["b"], sums(3))
    assert field.checksums is not None
    client.clear("a", "b")
    assert field.checksums is None, "with the last cell goes the column"


def test_a_later_run_may_have_another_policy() -> None:
    driver, client = ready()
    put(client, ["a"], sums(7))
    settings = {"reserve_fraction": 0.15, "heartbeat_s": 2.0, "session_timeout_s": 20.0}
    driver.apply(c.Restarted(epoch=8, checksums=Checksums.NEVER, **settings))
    driver.add_unit(name="unit0", unit=1)
    assert located(client, "a") is None
    assert not granted(client)
