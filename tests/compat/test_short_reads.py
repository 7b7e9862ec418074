"""Reads and lists that take the short way, and puts of tags, give the same as the general way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane.client.operations import sample_names, short_get
from dataplane.ledger.state import tags as tags_module
from tests.compat.test_short_puts import VALUES, outcome

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("service")]

FIELDS = {name: VALUES[position] for position, name in enumerate("xyz")}


def begin_reads(sent: list[str], read: Callable[[], Any]) -> None:
    """Read until the session knows the plan of the read and its unit."""
    for _ in range(2):
        read()
    sent.clear()


def change(choose: random.Random) -> None:
    """Put, tag or clear some samples of the partition "p"."""
    keys = choose.sample([f"k{number}" for number in range(12)], choose.choice([1, 1, 2, 3]))
    match choose.randrange(20):
        case 0:
            tq.kv_clear(keys, "p")
        case 1:
            tq.kv_batch_put(keys, "p", tags=[{"a": choose.choice([1, [2], "x"])} for _ in keys])
        case 2:
            odd = choose.choice(VALUES)(choose.randrange(9))
            tq.kv_put(keys[0], "p", {choose.choice(["x", "other"]): odd})
        case _:
            for key in keys:
                names = choose.sample("xyz", choose.choice([1, 2, 3, 3, 3]))
                tq.kv_put(key, "p", {name: FIELDS[name](choose.randrange(9)) for name in names})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strict", [False, True])
def test_both_ways_read_the_same(seed: int, strict: bool, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    tq.get_client()._stored_settings = {"strict_reads": strict}
    short = 0
    for step in range(80):
        if step % 30 == 0:  # samples with all fields, of their usual kinds
            tq.get_client().clear_partition("p")
            for number in range(12):
                tq.kv_put(f"k{number}", "p", {name: FIELDS[name](number) for name in "xyz"})
        if choose.random() < 0.5:
            change(choose)
        keys: Any = [f"k{choose.randrange(13)}" for _ in range(choose.choice([1, 1, 2, 4]))]
        names: Any = choose.choice([None, None, "x", ["x"], ["y", "x", "z"], ["x", "x"], ["nothing"], [], ["", ""]])
        for _ in range(2):
            sent.clear()
            got = outcome(lambda keys=keys, names=names: tq.kv_batch_get(keys, "p", names))
            short += sent == ["LocateRows"]
        with monkeypatch.context() as patch:
            patch.setattr(short_get, "prepare", lambda *_: None)
            assert got == outcome(lambda keys=keys, names=names: tq.kv_batch_get(keys, "p", names))
    assert short > 20


def test_a_read_is_one_command(sent: list[str]) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2, 3), "y": torch.arange(2)})
    for names in (["y", "x"], None):
        begin_reads(sent, lambda names=names: tq.kv_batch_get("a", "p", names))
        assert sorted(tq.kv_batch_get(["b", "a"], "p", names).keys()) == ["x", "y"]
        assert sent == ["LocateRows"]


def test_a_read_of_all_fields_has_those_that_were_added(sent: list[str]) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.arange(2)})
    begin_reads(sent, lambda: tq.kv_batch_get("a", "p"))
    tq.kv_put("a", "p", {"y": torch.arange(3)})
    assert sorted(tq.kv_batch_get("a", "p").keys()) == ["x", "y"]
    assert sorted(tq.kv_batch_get(["a", "b"], "p").keys()) == ["x"]
    assert sorted(tq.kv_batch_get("b", "p").keys()) == ["x"]


def test_a_caller_may_change_what_it_read(sent: list[str]) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(3), "z": "text"}, {"t": [1]})
    begin_reads(sent, lambda: tq.kv_batch_get("a", "p"))
    read = tq.kv_batch_get("a", "p")
    read["x"].values().fill_(7)
    assert tq.kv_batch_get("a", "p")["x"].unbind()[0].tolist() == [0, 1, 2]
    listed = tq.kv_list("p")["p"]
    listed["a"]["t"].append(2)
    assert tq.kv_list("p") == {"p": {"a": {"t": [1]}}}


TAGS: list[Callable[[int], Any]] = [
    lambda number: 1,
    lambda number: number,
    lambda number: bool(number % 2),
    lambda number: 0.5,
    lambda number: "running" if number % 3 else "done",
    lambda number: f"text {number}",
    lambda number: None if number % 2 else "x",
    lambda number: [1, number % 2],
    lambda number: {"a": None},
    lambda number: [1, 1.0, True][number % 3],
    lambda number: "\x1fobject:no value",
]


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_list_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags in columns with an index, and without; those of dicts that are alike, and of others."""
    choose = random.Random(seed)
    keys = [f"k{number}" for number in range(200)]
    for _ in range(12):
        some = choose.sample(keys, choose.choice([1, 60, 70, 200]))
        make = {name: choose.choice(TAGS) for name in choose.sample("abcd", choose.choice([1, 2, 3]))}
        tags = [{name: make[name](number) for name in make} for number in range(len(some))]
        for number in range(0, len(some), choose.choice([3, 1000])):
            tags[number].pop(next(iter(make)), None)
        results = []
        for partition, usual in (("fast", True), ("slow", False)):
            with monkeypatch.context() as patch:
                if not usual:
                    patch.setattr(sample_names, "_usual_columns", lambda *_: None)
                    patch.setattr(tags_module, "MIN_SHARED", 1 << 30)
                put = outcome(
                    lambda some=some, tags=tags, partition=partition: tq.kv_batch_put(some, partition, tags=tags)
                )
                listed = tq.kv_list(partition)[partition]
                results.append([repr(put), repr(listed), repr(tq.kv_batch_put(some, partition, tags=tags).tags)])
                assert len({id(each) for each in listed.values()}) == len(listed)
        assert results[0] == results[1]
        assert len(listed) == len(set(listed))
        tq.kv_clear(choose.sample(keys, 20), "fast")
        kept = tq.kv_list("fast")["fast"]
        tq.kv_clear([key for key in keys if key not in kept], "slow")


def test_tags_are_one_command(sent: list[str]) -> None:
    tq.kv_put("a", "p", tag={"n": 1})  # creates the partition
    sent.clear()
    meta = tq.kv_put("a", "p", tag={"m": "x"})
    assert (meta.tags, meta.fields) == ([{"n": 1, "m": "x"}], [])
    tq.kv_batch_put(["a", "b"], "p", tags=[{"n": 2}, {}])
    assert sent == ["PutRows", "Commit"]  # a tag that not all samples get has no short form
    assert tq.kv_list("p") == {"p": {"a": {"n": 2, "m": "x"}, "b": {}}}


def test_an_empty_put_creates_samples() -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({}, 2))
    assert tq.kv_list("p") == {"p": {"a": {}, "b": {}}}
