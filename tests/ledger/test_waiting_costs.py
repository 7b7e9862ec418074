"""Calls that wait cost others what they change, not what is stored; and what fails in them is theirs alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dataplane.errors import CapacityTimeoutError, ClaimTimeoutError, InternalError
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.budgets import Evictions
from dataplane.ledger.allocation.reservations import Reservations
from dataplane.ledger.claims import why_blocked
from dataplane.ledger.claims.claims import Claims
from dataplane.ledger.state import sessions
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import Parked, ParkedAllocate, ParkedClaim
from dataplane.ledger.state.tags import Tags
from tests.ledger.driver import Client, Driver, by_ids, part_of

KIB = 1024
MANY = 2000


class Looks:
    """Counts the rows that the ledger looks at to judge who waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        for owner, name, at in (
            (Partition, "ready", 3),
            (Tags, "matches", 2),
            (Tags, "codes", 2),
            (Tags, "present", 2),
            (Evictions, "_eviction_status", 2),
        ):
            self.count(monkeypatch, owner, name, at)

    def count(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            self.rows += len(arguments[at])
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture
def crowd() -> Iterator[tuple[Driver, Client]]:
    driver = Driver(capacity=1 << 20, reserve_fraction=0.0)
    driver.judged = 0
    client = driver.client()
    client.watermark = 1
    yield driver, client
    driver.judged = 1 << 30
    driver.tick(driver.now)


def test_a_put_that_waits_for_eviction_costs_other_partitions_nothing(
    crowd: tuple[Driver, Client], looks: Looks
) -> None:
    _, client = crowd
    client.register(budget_bytes=MANY * 64, when_full=c.WhenFull.EVICT)
    client.register("q")
    client.put([f"p{i}" for i in range(MANY)], {"x": [64] * MANY})
    waiting = client.waits(client.allocate({"x": [KIB]}))
    looks.rows = 0
    for i in range(50):
        client.put([f"q{i}"], {"x": [64]}, partition="q")
        client.clear(f"q{i}", partition="q")
    assert looks.rows <= 50
    assert client.result(waiting) is None


@pytest.mark.parametrize("policy", [c.WhenFull.EVICT, c.WhenFull.EVICT_OLDEST])
def test_a_put_that_waits_for_eviction_costs_its_partition_what_changes(
    crowd: tuple[Driver, Client], looks: Looks, policy: c.WhenFull
) -> None:
    """It is served by the sixteenth acknowledgement, and nobody looks at all samples before."""
    _, client = crowd
    client.register(budget_bytes=MANY * 64, when_full=policy)
    for i in range(MANY):
        client.put([f"s{i}"], {"x": [64]})
    held = client.call(c.Claimed, client.claim(MANY, lease_s=60.0))
    waiting = client.waits(client.allocate({"x": [KIB]}))
    looks.rows = 0
    for i in range(15):
        client.do(c.Ack(partition="p", task="train", **part_of(held, held.ids[i])))
        assert client.result(waiting) is None
    assert looks.rows <= 50
    client.do(c.Ack(partition="p", task="train", **part_of(held, held.ids[15])))
    assert isinstance(client.result(waiting), c.Allocated)


@pytest.mark.parametrize("missing", ["budget", "memory", "a larger piece"])
def test_the_values_of_a_put_that_waits_are_not_gone_through_for_what_others_free(
    crowd: tuple[Driver, Client], looks: Looks, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    _, client = crowd
    client.register("q")
    client.register(budget_bytes=MANY * 64 if missing == "budget" else None)
    for i in range(100):
        client.put([f"q{i}"], {"x": [64]}, partition="q")
    client.put(["first"], {"x": [64]})
    sizes = [64] * MANY
    if missing != "budget":
        client.put(["rest"], {"x": [(1 << 20) - 101 * 64]}, partition="q")
        client.clear(*[f"q{i}" for i in range(0, 100, 2)], partition="q")
        sizes = [128] + [0] * MANY if missing == "a larger piece" else sizes
    waiting = client.waits(client.allocate({"x": sizes}))
    looks.rows = 0
    real = sessions.top

    def counted(values: Any) -> int:
        looks.rows += len(values)
        return real(values)

    monkeypatch.setattr(sessions, "top", counted)
    for i in range(1, 100, 4):
        if missing == "memory":
            client.clear(f"q{i}", partition="q")
        else:
            client.put(["one"], {"x": [64]}, partition="q")
            client.clear("one", partition="q")
    assert looks.rows <= 100
    assert client.result(waiting) is None


def test_a_call_that_nobody_waits_for_has_no_waiting_call_evaluated(
    crowd: tuple[Driver, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, client = crowd
    client.register()
    client.register("q")
    claims = [client.waits(client.claim(1)) for _ in range(50)]
    evaluated: list[object] = []
    for part in (Claims, Reservations):
        monkeypatch.setattr(part, "serve_waiting", evaluated.append)
    for i in range(3):
        client.put([f"q{i}"], {"x": [KIB]}, partition="q")
        client.clear(f"q{i}", partition="q")
        driver.tick(driver.now + 0.01)
    assert evaluated == []
    monkeypatch.undo()
    client.put(["p0"], {"x": [KIB]})
    assert isinstance(client.result(claims[0]), c.Claimed)
    assert client.result(claims[1]) is None


def test_what_was_freed_before_a_put_waits_does_not_have_it_evaluated_again(
    crowd: tuple[Driver, Client],
) -> None:
    driver, client = crowd
    client.register()
    client.put(["a"], {"x": [KIB]})
    client.clear("a")
    extents = driver.ledger._state.extents
    assert not extents.freed
    assert not extents.loosened


class Untouched(dict[int, Any]):
    """What is looked up by number only."""

    def values(self) -> Any:
        raise AssertionError("every claim of every session was looked at")

    __iter__ = items = values


def test_what_is_claimed_for_good_is_known_without_a_look_at_every_session(crowd: tuple[Driver, Client]) -> None:
    driver, client = crowd
    client.register(budget_bytes=4 * 64, when_full=c.WhenFull.EVICT)
    client.register("q")
    for name in "abcd":
        client.put([name], {"x": [64]})
    client.put([f"q{i}" for i in range(20)], {"x": [64] * 20}, partition="q")
    for i in range(20):
        other = driver.client(f"other {i}")
        assert other.claimed(1, partition="q") == (f"q{i}",)
        session = driver.ledger._state.sessions[other.session]
        session.unconfirmed = Untouched(session.unconfirmed)
    assert client.claimed(1) == ("a",)
    client.watermark = None
    assert client.claimed(1) == ("b",)
    saved = client.call(c.Saved, c.Save(partitions=("p", "q")))
    client.do(c.Release(located=client.last_call_id))
    bits = {part.partition: part.tasks[0].claimed for part in saved.partitions}
    assert bits == {"p": b"\xc0", "q": b"\0\0\0"}, "b is for good by the call that saves, what others have is not"
    client.put(["e"], {"x": [64]})
    assert client.call(c.Listed, c.List(partition="p")).ids == ("b", "c", "d", "e")


KINDS: dict[str, dict[str, Any]] = {
    "where": {"where": (c.Predicate(tag="score", op=">", value=1),)},
    "max_lag": {"max_lag": 1},
    "groups": {"group_by": "of", "group_size": 2},
    "groups that wait": {"group_by": "of", "group_size": 2, "partial_after_s": 50.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_that_waits_costs_puts_into_its_partition_what_they_name(
    crowd: tuple[Driver, Client], looks: Looks, kind: str
) -> None:
    driver, client = crowd
    client.register(num_samples=None)
    client.do(c.SetVersion(partition="p", version=9))
    ids = [f"p{i}" for i in range(MANY)]
    tags: dict[str, Any] = {"score": [0] * MANY, "weight_version": [0] * MANY, "of": ids}
    client.put(ids, {"x": [64] * MANY}, tags=tags)
    batch = KINDS[kind].get("group_size", 1)
    waiting = client.waits(client.claim(batch, **KINDS[kind], timeout_s=100.0))
    client.put(["first"], {"x": [64]}, tags={"score": [0], "weight_version": [0], "of": ["first"]})
    looks.rows = 0
    for i in range(50):
        client.put([f"late{i}"], {"x": [64]}, tags={"score": [0], "weight_version": [0], "of": [f"late{i}"]})
    assert looks.rows <= 50 * 6
    assert client.result(waiting) is None
    driver.judged = 1 << 30
    driver.tick(1.0)
    client.put(["new", "too"], {"x": [64] * 2}, tags={"score": [2, 2], "weight_version": [9, 9], "of": ["p7", "p7"]})
    assert isinstance(client.result(waiting), c.Claimed)


# --- many that wait


CROWD = 200


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Parked]:
    """Each look at the partition of a call that waits adds that call."""
    found: list[Parked] = []

    def look(parked: Parked) -> Any:
        found.append(parked)
        return vars(parked)["partition"]

    def note(parked: Parked, partition: Partition) -> None:
        vars(parked)["partition"] = partition

    for kind in (ParkedAllocate, ParkedClaim):
        monkeypatch.setattr(kind, "partition", property(look, note), raising=False)
    return found


@pytest.mark.parametrize("missing", ["budget", "memory", "a larger piece"])
def test_many_puts_that_wait_cost_others_little(
    crowd: tuple[Driver, Client], looked_at: list[Parked], missing: str
) -> None:
    """Of those of a partition only the first is looked at, unless it lets others pass."""
    _, client = crowd
    client.register("q")
    client.register(budget_bytes=KIB if missing != "memory" else None)
    for i in range(100):
        client.put([f"q{i}"], {"x": [64]}, partition="q")
    client.put(["first"], {"x": [KIB - 128]})
    if missing != "budget":
        client.put(["rest"], {"x": [(1 << 20) - 100 * 64 - KIB + 128]}, partition="q")
    if missing == "a larger piece":
        client.clear(*[f"q{i}" for i in range(0, 100, 2)], partition="q")
    size = {"budget": 256, "memory": 4 * KIB, "a larger piece": 128}[missing]
    waiting = [client.waits(client.allocate({"x": [size]}, timeout_s=60.0)) for _ in range(CROWD)]
    looked_at.clear()
    for i in range(1, 40, 2):
        if missing == "memory":
            client.clear(f"q{i}", partition="q")
        else:
            client.put(["one"], {"x": [64]}, partition="q")
            client.clear("one", partition="q")
    assert len(looked_at) <= 20 * 40
    assert [client.result(number) for number in waiting] == [None] * CROWD


@pytest.mark.parametrize("policy", [c.WhenFull.WAIT, c.WhenFull.EVICT, c.WhenFull.EVICT_OLDEST])
def test_puts_that_wait_for_budgets_of_many_partitions_cost_others_nothing(
    crowd: tuple[Driver, Client], looked_at: list[Parked], policy: c.WhenFull
) -> None:
    driver, client = crowd
    local = driver.client(attach=[1])
    client.register("q")
    reading = {}
    for i in range(CROWD):
        client.register(f"p{i}", budget_bytes=KIB, when_full=policy)
        client.put(["first"], {"x": [KIB]}, partition=f"p{i}")
        client.locate(by_ids("first"), partition=f"p{i}")
        reading[i] = client.last_call_id
    waiting = [client.waits(client.allocate({"x": [64]}, f"p{i}")) for i in range(CROWD)]
    for _ in range(2):
        client.put(["one"], {"x": [64]}, partition="q")
    looked_at.clear()
    for _ in range(20):
        client.put(["one"], {"x": [64]}, partition="q")
        client.put(["two"], {"x": [64]}, partition="q")
        client.clear("two", partition="q")
        local.call(c.Preallocated, c.Preallocate(unit=1, nbytes=64))
    assert not {parked.call_id for parked in looked_at} & set(waiting)
    assert [client.result(number) for number in waiting] == [None] * CROWD
    client.clear("first", partition="p7")
    assert client.result(waiting[7]) is None, "it is read"
    client.do(c.Release(located=reading[7]))
    assert isinstance(client.result(waiting[7]), c.Allocated)
    client.register("p8", budget_bytes=2 * KIB, when_full=policy)
    assert isinstance(client.result(waiting[8]), c.Allocated)
    client.clear("first", partition="p9")
    driver.apply(c.UnitLost(unit=1))
    client.do(c.Release(located=reading[9]))
    assert client.result(waiting[9]) is None
    driver.add_unit(name="unit0", epoch=1)
    assert isinstance(client.result(waiting[9]), c.Allocated)


def test_many_claims_that_wait_cost_who_serves_one_little(
    crowd: tuple[Driver, Client], looked_at: list[Parked]
) -> None:
    _, client = crowd
    client.register()
    waiting = [client.waits(client.claim(1, timeout_s=60.0)) for _ in range(CROWD)]
    looked_at.clear()
    for i in range(20):
        client.put([f"s{i}"], {"x": [64]})
    assert [client.claimed_by(number) for number in waiting[:20]] == [(f"s{i}",) for i in range(20)]
    assert len(looked_at) <= 20 * 10
    client.put([f"t{i}" for i in range(CROWD)], {"x": [64] * CROWD})
    assert [client.claimed_by(number) for number in waiting[20:]] == [(f"t{i}",) for i in range(CROWD - 20)]


class Examined(dict[tuple[int, int], ParkedClaim]):
    """The parked claims, with a count of those that were looked up."""

    count = 0

    def get(self, key: tuple[int, int], default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)

    def __getitem__(self, key: tuple[int, int]) -> ParkedClaim:
        self.count += 1
        return super().__getitem__(key)


def test_a_put_examines_the_claims_that_it_wakes(crowd: tuple[Driver, Client]) -> None:
    driver, client = crowd
    client.register()
    waiting = [client.waits(client.claim(2 + number, timeout_s=60.0)) for number in range(CROWD)]
    claims = Examined(driver.ledger._state.claim_waiters)
    driver.ledger._state.claim_waiters = claims
    client.put(["a"], {"x": [64]})
    assert claims.count == 0
    client.put(["b"], {"x": [64]})
    assert client.claimed_by(waiting[0]) == ("a", "b")
    assert claims.count <= 2
    for number in range(20):
        client.put([f"s{number}"], {"x": [64]})
    assert claims.count <= 20


# --- pieces that are too small


def fragmented() -> tuple[Driver, Client]:
    """Ten samples of 1 KiB in an arena of 10 KiB, of which every second went."""
    driver = Driver(capacity=10 * KIB, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    client.register("other")
    for i in range(10):
        client.put([f"s{i}"], {"x": [KIB]})
    client.clear(*[f"s{i}" for i in range(0, 10, 2)])
    return driver, client


def test_a_put_that_finds_no_large_enough_piece_holds_up_nobody() -> None:
    driver, client = fragmented()
    large = client.waits(client.allocate({"x": [2 * KIB]}, timeout_s=5.0))
    client.put(["little"], {"x": [40]}, partition="other")
    client.put(["too"], {"x": [40]})
    driver.tick(5.0)
    error = client.result(large)
    assert isinstance(error, CapacityTimeoutError)
    assert (error.facts["fragments"], error.facts["largest_free_bytes"]) == (5, KIB)
    assert "fragmented: 5 pieces of at most 1,024" in str(error)


def test_who_waited_behind_it_for_memory_is_served_when_it_is_pieces_that_are_missing() -> None:
    _, client = fragmented()
    filler = [client.post(client.allocate({"x": [KIB]})) for _ in range(5)]
    large = client.waits(client.allocate({"x": [2 * KIB]}))
    little = client.waits(client.allocate({"x": [40]}, "other"))
    client.do(c.Abort(reservation=filler[0]))
    assert client.result(little) is None, "one who waits for memory that is not there is passed by nobody"
    client.do(c.Abort(reservation=filler[2]))
    assert client.result(large) is None
    assert isinstance(client.result(little), c.Allocated)
    client.clear("s1")
    client.do(c.Abort(reservation=little))
    assert isinstance(client.result(large), c.Allocated)


def test_no_pieces_are_told_of_where_memory_is_missing() -> None:
    driver, client = fragmented()
    waiting = client.waits(client.allocate({"x": [6 * KIB]}, timeout_s=1.0))
    driver.tick(1.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert error.facts["fragments"] == 0
    assert "fragmented" not in str(error)


# --- what fails in one that waits


def test_a_waiting_claim_that_cannot_be_judged_ends_and_who_changed_a_sample_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    driver.judged = 0
    bad = client.waits(client.claim(1, where=(c.Predicate(tag="bad", op="==", value=1),)))
    good = client.waits(client.claim(2, where=(c.Predicate(tag="good", op="==", value=1),)))
    real = Tags._match

    def match(tags: Tags, predicate: c.Predicate, rows: Any) -> Any:
        if predicate.tag == "bad":
            raise OverflowError("int too large to convert to float")
        return real(tags, predicate, rows)

    monkeypatch.setattr(Tags, "_match", match)
    client.put(["a"], {"x": [64]}, tags={"good": [1]})
    error = client.result(bad)
    assert isinstance(error, InternalError)
    assert "int too large" in str(error)
    assert any(isinstance(order, c.Notice) and "int too large" in order.text for order in driver.orders)
    client.put(["b"], {"x": [64]}, tags={"good": [1]})
    assert client.claimed_by(good) == ("a", "b")


def test_a_claim_that_fails_when_it_is_taken_leaves_its_samples_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    driver.judged = 0
    bad = client.waits(client.claim(2))
    real, failing = Tags.of, [True]

    def of(tags: Tags, rows: Any) -> Any:
        if failing:
            failing.clear()
            raise OverflowError("of one claim")
        return real(tags, rows)

    monkeypatch.setattr(Tags, "of", of)
    client.put(["a", "b"], {"x": [64, 64]})
    assert isinstance(client.result(bad), InternalError)
    assert client.claimed(2) == ("a", "b")


def test_a_waiting_put_that_cannot_be_judged_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, client = fragmented()
    driver.judged = 0
    bad = client.waits(client.allocate({"x": [6 * KIB]}))
    good = client.waits(client.allocate({"x": [7 * KIB]}))
    failing = [True]

    def refuse(reservations: Any, partition: Partition, want: Any) -> None:
        if failing:
            failing.clear()
            raise OverflowError("of one put")

    monkeypatch.setattr("dataplane.ledger.allocation.reservations.Reservations._check_can_ever_fit", refuse)
    client.clear("s1", "s3", "s5", "s7", "s9")
    assert isinstance(client.result(bad), InternalError)
    assert isinstance(client.result(good), c.Allocated)


def test_a_claim_whose_timeout_cannot_be_explained_ends_and_others_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    calls = [client.waits(client.claim(1, timeout_s=1.0)) for _ in range(2)]
    real, failing = why_blocked.blocked, [True]

    def fail(*arguments: Any) -> Any:
        if failing:
            failing.clear()
            raise OverflowError("of one claim")
        return real(*arguments)

    monkeypatch.setattr("dataplane.ledger.claims.claims.blocked", fail)
    driver.tick(1.0)
    assert isinstance(client.result(calls[0]), InternalError)
    assert isinstance(client.result(calls[1]), ClaimTimeoutError)
