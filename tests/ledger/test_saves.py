"""Checkpoints in the ledger: what a Save takes stays as it was, and what is staged and published is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import (
    FieldNotFoundError,
    InvalidRequestError,
    LimitError,
    PartitionDroppedError,
    PartitionExistsError,
    PartitionNotFoundError,
    SchemaError,
)
from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from tests.ledger.driver import BYTES, Client, Driver, handles
from tests.ledger.fingerprint import fingerprint
from tests.ledger.values import canonical


def bits(*flags: int) -> bytes:
    return np.packbits(np.array(flags, np.bool_)).tobytes()


def save(client: Client, *partitions: str) -> tuple[int, c.Saved]:
    saved = client.call(c.Saved, c.Save(partitions=partitions))
    return client.last_call_id, saved


def page(client: Client, call_id: int, first: int, last: int, *fields: str, names: bool = False) -> c.SavedRows:
    command = c.ReadSaved(saved=call_id, partition="p", first=first, last=last, fields=fields, names=names)
    return client.call(c.SavedRows, command)


def claimed(saved: c.Saved, task: str) -> bytes:
    (partition,) = saved.partitions
    return next(kept.claimed for kept in partition.tasks if kept.name == task)


def test_what_was_saved_stays_whatever_happens_and_no_byte_of_it_is_reused() -> None:
    driver = Driver()
    client, other = driver.client(), driver.client()
    client.register(specs={"x": BYTES}, num_samples=3, group_size=2, enums={"kind": ("a", "b")}, tasks=("train",))
    client.put(["a", "b"], {"x": [100, 200]}, tags={"kind": ["a", "b"], "n": [1, (1 << 63) - 1]})
    client.put(["c"], tags={"n": [2.5]})
    used = client.used()
    call_id, saved = save(client)
    (found,) = saved.partitions
    assert (found.partition, found.live, found.born, found.num_samples, found.group_size) == ("p", 3, 3, 3, 2)
    assert (found.enums, found.strict, found.sealed, found.version) == ({"kind": ("a", "b")}, False, False, None)
    assert [(field.name, field.declared) for field in found.fields] == [("x", BYTES)]
    before = canonical(page(client, call_id, 0, 3, "x", names=True))
    other.put(["a", "c"], {"x": [70, 70]}, tags={"n": [9, 9]})
    other.clear("b")
    other.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert canonical(page(client, call_id, 0, 3, "x", names=True)) == before
    rows = page(client, call_id, 1, 3, "x", names=True)
    assert rows.ids == ("b", "c")
    assert rows.fields[0].lengths.tolist() == [200, -1]
    assert {tag.name: tag.values for tag in rows.tags} == {"kind": ("b",), "n": ((1 << 63) - 1, 2.5)}
    assert client.used() == used
    client.do(c.Release(located=call_id))
    assert client.used() == 0
    with pytest.raises(InvalidRequestError, match="holds no saved partitions"):
        page(client, call_id, 0, 1)


def test_what_is_shared_lies_at_one_place() -> None:
    client = Driver().client()
    client.register()
    client.put(["a", "b", "c"], {"x": [64, 10]}, index=[1, 0, 1])
    call_id, _ = save(client)
    cells = page(client, call_id, 0, 3, "x").fields[0]
    assert cells.offsets[0] == cells.offsets[2] != cells.offsets[1]
    assert cells.lengths.tolist() == [10, 64, 10]


def test_only_what_is_claimed_for_good_is_saved_as_claimed() -> None:
    driver = Driver()
    client, other = driver.client(), driver.client()
    client.register(tasks=("train", "score"))
    client.put(list("abcdefghi"), {"x": [1] * 9})
    assert other.claimed(2) == ("a", "b")  # confirmed by the next call
    assert other.claimed(1, lease_s=60.0) == ("c",)
    got = other.call(c.Claimed, other.claim(1, lease_s=60.0))
    other.ack(got, "d")
    share = {"dp_world": 2, "step": 0, "sampler": "sequential"}
    assert other.claimed(2, dp_rank=0, **share) == ("e",)
    other.call(c.UnitList, c.Units())
    other.watermark = other.last_call_id
    assert other.claimed(1) == ("g",)  # never confirmed
    _, saved = save(client)
    assert claimed(saved, "train") == bits(1, 1, 0, 1, 1, 0, 0, 0, 0)
    assert claimed(saved, "score") == bits(*[0] * 9)
    # What the saving client claimed itself is confirmed by the Save.
    assert client.claimed(2, task="score") == ("a", "b")
    _, saved = save(client)
    assert claimed(saved, "score") == bits(1, 1, *[0] * 7)


def test_a_save_is_all_or_nothing_and_reads_are_checked() -> None:
    client = Driver().client()
    client.register()
    client.register("q")
    client.put(["a"], {"x": [100]})
    with pytest.raises(PartitionNotFoundError):
        client.raise_(c.Save(partitions=("p", "no")))
    with pytest.raises(InvalidRequestError, match="twice"):
        client.raise_(c.Save(partitions=("p", "p")))
    assert client.unit().pinned_bytes == 0
    call_id, saved = save(client, "q", "p")
    assert [found.partition for found in saved.partitions] == ["q", "p"]
    assert client.unit().pinned_bytes == 128
    for first, last in ((-1, 1), (0, 2), (1, 0)):
        with pytest.raises(InvalidRequestError, match="saved"):
            page(client, call_id, first, last)
    with pytest.raises(FieldNotFoundError):
        page(client, call_id, 0, 1, "y")
    with pytest.raises(PartitionNotFoundError):
        client.raise_(c.ReadSaved(saved=call_id, partition="r", first=0, last=0))
    with pytest.raises(InvalidRequestError, match="no saved partitions"):
        client.driver.client().raise_(c.ReadSaved(saved=call_id, partition="p", first=0, last=0))


def test_a_session_holds_few_saves_at_once() -> None:
    client = Driver(limits=Limits(saves=2)).client()
    client.register()
    first, _ = save(client)
    save(client)
    with pytest.raises(LimitError, match="saves held by one session: 3, and the limit is 2"):
        client.raise_(c.Save())
    client.do(c.Release(located=first))
    save(client)


def test_a_release_that_overtakes_its_save_keeps_it_from_happening() -> None:
    client = Driver().client()
    client.register()
    client.put(["a"], {"x": [100]})
    client.last_call_id += 1
    late = client.last_call_id
    client.open.append(late)
    client.do(c.Release(located=late))
    client.post(c.Save(), call_id=late)
    assert client.unit().pinned_bytes == 0


@pytest.mark.parametrize("how", ["bye", "gone"])
def test_saves_and_staged_partitions_go_with_their_session(how: str) -> None:
    driver = Driver()
    client, last = driver.client(attach=[1]), driver.client()
    client.register()
    client.put(["a"], {"x": [100]})
    save(client)
    last.clear("a")
    client.do(c.Stage(partition="hidden"))
    client.put(["b"], {"x": [100]}, partition="hidden")
    waiting = last.waits(last.allocate({"x": [891_200]}, "hidden"))
    if how == "bye":
        client.post(c.Bye())
        assert [part.partition for part in last.stats().partitions] == ["p"]
    driver.apply(c.SessionGone(unit=1, session=client.session))
    assert [part.partition for part in last.stats().partitions] == ["p"]
    assert isinstance(last.result(waiting), PartitionDroppedError)
    assert last.used() == 0


def described(**changes: Any) -> c.SavedPartition:
    plain: dict[str, Any] = {"partition": "p", "live": 3, "born": 5, "fields": (), "tasks": ()}
    return c.SavedPartition(**{**plain, **changes})


def staged(client: Client, name: str = "hidden") -> c.Committed:
    client.do(c.Stage(partition=name))
    made = client.put(["a", "b", "c"], partition=name, tags={"n": [1, 2, 3]})
    client.put(
        c.Samples(rows=made.rows[:2], generations=made.generations[:2]), {"x": [10, 20]}, partition=name, update=True
    )
    return made


def test_published_partitions_are_what_was_saved() -> None:
    client = Driver().client()
    made = staged(client)
    wanted = described(
        fields=(c.SavedField(name="y", declared=FieldSpec(FieldKind.DENSE)), c.SavedField(name="x")),
        tasks=(c.SavedTask(name="train", claimed=bits(1, 0, 1)), c.SavedTask(name="score", claimed=bits(0, 0, 0))),
        num_samples=5,
        group_size=3,
        enums={"kind": ("a",)},
        strict=True,
        sealed=True,
        version=7,
    )
    client.do(c.Publish(staged=("hidden",), partitions=(wanted,)))
    (stats,) = client.stats().partitions
    assert (stats.partition, stats.live, stats.born, stats.num_samples, stats.sealed) == ("p", 3, 5, 5, True)
    assert (stats.version, stats.claimed) == (7, {"train": 2, "score": 0})
    assert client.claimed(3, blocking=False) == ("b",)
    assert client.claimed(9, ["x"], task="score", blocking=False) == ("a", "b")
    assert client.locate(handles(made), fields=()).rows.tolist() == made.rows.tolist()
    with pytest.raises(SchemaError, match="undeclared"):
        client.put(["a"], {"x": [1]})
    _, saved = save(client)
    (again,) = saved.partitions
    expected = (c.SavedTask(name="train", claimed=bits(1, 1, 1)), c.SavedTask(name="score", claimed=bits(1, 1, 0)))
    assert canonical(again) == canonical(described(**{**parts(wanted), "tasks": expected}))


def parts(saved: c.SavedPartition) -> dict[str, Any]:
    return {name: getattr(saved, name) for name in saved.__struct_fields__}


def test_what_is_staged_is_not_saved() -> None:
    client = Driver().client()
    client.register()
    staged(client)
    _, saved = save(client)
    assert [found.partition for found in saved.partitions] == ["p"]


def test_replacing_drops_what_was_there_and_tells_who_waited() -> None:
    driver = Driver()
    client, other = driver.client(), driver.client()
    client.register()
    client.put(["old"], {"x": [1000]})
    waiting = other.waits(other.claim(2))
    staged(client)
    with pytest.raises(PartitionExistsError):
        client.raise_(c.Publish(staged=("hidden",), partitions=(described(),)))
    assert [part.partition for part in client.stats().partitions] == ["p", "hidden"]
    client.do(c.Publish(staged=("hidden",), partitions=(described(),), replace=True))
    assert isinstance(other.result(waiting), PartitionDroppedError)
    assert client.call(c.Listed, c.List(partition="p")).ids == ("a", "b", "c")
    assert client.used() == 64


def test_nothing_of_the_schema_that_was_there_is_kept() -> None:
    client = Driver().client()
    specs = {"x": FieldSpec(FieldKind.DENSE, "int64", (1,)), "old": BYTES}
    client.register(specs=specs, tasks=("train", "old"), num_samples=9, group_size=3, enums={"kind": ("a",)})
    client.put(["old"], {"old": [10]}, tags={"gone": [1]})
    staged(client)
    wanted = described(fields=(c.SavedField(name="x"),), tasks=(c.SavedTask(name="train", claimed=bits(0, 0, 0)),))
    client.do(c.Publish(staged=("hidden",), partitions=(wanted,), replace=True))
    _, saved = save(client)
    assert canonical(saved.partitions) == canonical((wanted,))
    assert client.call(c.Described, c.Describe(partition="p")).fields == {"x": BYTES}
    assert set(client.stats().partitions[0].produced) == {"x"}


def test_several_are_published_together_also_under_each_others_names() -> None:
    client = Driver().client()
    staged(client, "one")
    staged(client, "two")
    client.put(["d"], partition="two")
    wanted = (described(partition="two"), described(partition="one", live=4))
    client.do(c.Publish(staged=("one", "two"), partitions=wanted))
    assert {part.partition: part.live for part in client.stats().partitions} == {"two": 3, "one": 4}


def test_a_lease_given_before_the_publish_ends_in_the_partitions_new_name() -> None:
    driver = Driver()
    client = driver.client()
    tasks = (c.SavedTask(name="train", claimed=bits(0, 0, 0)),)
    for name in ("one", "two"):
        staged(client, name)
        client.register(name)
    assert client.claimed(1, partition="one", lease_s=5.0, blocking=False) == ("a",)
    wanted = (described(partition="two", tasks=tasks), described(partition="one", tasks=tasks))
    client.do(c.Publish(staged=("one", "two"), partitions=wanted))
    assert client.claimed(9, partition="two", blocking=False) == ("b", "c")
    driver.tick(6.0)
    assert client.claimed(9, partition="two", blocking=False) == ("a",)
    assert client.claimed(9, partition="one", blocking=False) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"live": 2}, InvalidRequestError, "3 samples were staged, expected 2"),
        ({"born": 2}, InvalidRequestError, "born=2 must be at least the staged samples, 3"),
        ({"partition": ""}, InvalidRequestError, None),
        ({"tasks": (c.SavedTask(name="t", claimed=b""),)}, InvalidRequestError, "task 't': 0 bytes.*expected 1"),
        ({"tasks": (c.SavedTask(name="t", claimed=b"\0\0"),)}, InvalidRequestError, "task 't': 2 bytes.*expected 1"),
        ({"tasks": (c.SavedTask(name="t", claimed=b"\0"),) * 2}, InvalidRequestError, None),
        ({"fields": (c.SavedField(name="x", declared=FieldSpec(FieldKind.DENSE)),)}, SchemaError, None),
        ({"group_size": 0}, InvalidRequestError, None),
    ],
)
def test_a_publish_that_fails_changes_nothing(
    changes: dict[str, Any], error: type[Exception], says: str | None
) -> None:
    driver = Driver()
    client, other = driver.client(), driver.client()
    staged(client)
    staged(client, "good")
    client.register()
    wanted = (described(partition="new"), described(**changes))
    before = canonical(client.stats().partitions)
    with pytest.raises(error, match=says):
        client.raise_(c.Publish(staged=("good", "hidden"), partitions=wanted, replace=True))
    with pytest.raises(InvalidRequestError, match="not staged by"):
        other.raise_(c.Publish(staged=("hidden",), partitions=(described(),), replace=True))
    with pytest.raises(InvalidRequestError, match="without repeats"):
        client.raise_(c.Publish(staged=("good", "hidden"), partitions=(described(), described()), replace=True))
    with pytest.raises(PartitionNotFoundError):
        client.raise_(c.Publish(staged=("none",), partitions=(described(),)))
    with pytest.raises(PartitionExistsError):
        client.raise_(c.Stage(partition="good"))
    assert canonical(client.stats().partitions) == before


def test_saves_and_staged_partitions_are_in_the_image() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a", "b"], {"x": [10, 200]}, tags={"t": ["x", None]})
    call_id, _ = save(client)
    staged(client)
    made = Ledger.restored(driver.ledger.image())
    assert fingerprint(made) == fingerprint(driver.ledger) == fingerprint(driver.replay())
    client.last_call_id += 1
    read = c.ReadSaved(saved=call_id, partition="p", first=0, last=2, fields=("x",), names=True)
    for command in (read, c.Publish(staged=("hidden",), partitions=(described(),), replace=True)):
        call = c.Call(
            session=client.session, call_id=client.last_call_id, watermark=client.last_call_id, command=command
        )
        client.last_call_id += 1
        assert canonical(made.apply(call)) == canonical(driver.ledger.apply(call))
    assert fingerprint(made) == fingerprint(driver.ledger)
