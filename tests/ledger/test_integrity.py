"""Which rows get checksums, what becomes of these, and who is to compare them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dataplane.core.types import PROTOCOL_VERSION, Checksums
from dataplane.errors import InvalidRequestError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids, commit_columns
from tests.ledger.fingerprint import fingerprint
from tests.ledger.values import canonical


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
    number = client.post(client.allocate({"x": sizes}))
    (column,) = commit_columns({"x": sizes}, index=index)
    column = c.CommitColumn(name="x", spec=column.spec, lengths=column.lengths, index=column.index, checksums=checksums)
    commit = c.Commit(partition="p", samples=by_ids(*ids), mode=c.Mode.UPSERT, reservation=number, columns=(column,))
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
    number = remote.post(remote.allocate({"x": [8]}, unit_wish=2))
    columns = (with_checksums(commit_columns({"x": [8]})[0], sums(9)),)
    commit = c.Commit(partition="p", samples=by_ids("c"), mode=c.Mode.UPSERT, reservation=number, columns=columns)
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
    ask = c.Call(session=client.session, number=1000, watermark=1000, command=locate)
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
    (answer,) = made.apply(c.Call(session=client.session, number=100, watermark=100, command=locate))
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
