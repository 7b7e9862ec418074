"""Who waits is served as soon as it can be, and costs nobody anything else: judged by what changed, everybody who waits
gets what they would get if all were judged again (`Driver` has that checked after every input)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids, commit_columns, part_of
from tests.ledger.fingerprint import fingerprint
from tests.profiles import FACTOR

KIB = 1024
PARTITIONS = ("p", "q")
TASKS = ("train", "score")
FIELDS = ("x", "y")
GROUPS: tuple[tuple[Any, ...], ...] = ((1, 2, 3), ("a", "b"), (1.0, 2.0, float("nan")), (True, 1, "a", None, 2.5))


class Crowd:
    """Many clients that wait for all there is to wait for, and others that do what may end their waits."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.driver = Driver(
            capacity=self.chance.choice([3, 6]) * KIB,
            units=self.chance.randint(1, 2),
            limits=Limits(steps=3, interests=4),
            reserve_fraction=self.chance.choice([0.0, 0.2]),
        )
        self.driver.judged = 1 << 30
        self.clients = [self.driver.client(f"c{i}") for i in range(3)]
        for client in self.clients:
            client.watermark = 1
        self.groups = self.chance.choice(GROUPS)
        self.born = 0
        self.reservations: list[tuple[Client, int, str, list[str], list[int]]] = []
        self.located: list[tuple[Client, int]] = []
        self.claims: list[tuple[Client, int, c.Claim]] = []
        self.step = 0
        for partition in PARTITIONS:
            self.register(partition)

    def client(self) -> Client:
        return self.chance.choice(self.clients)

    def post(self, client: Client, command: c.Command) -> int:
        """Most of the answers are confirmed at once, some never."""
        if self.chance.random() < 0.7:
            client._settle()
            client.watermark = max(client.watermark or 1, min(client.open, default=client.last_call_id + 1))
        return client.post(command)

    def ids(self, partition: str, most: int = 4) -> list[str]:
        living = list(self.driver.ledger._state.partitions[partition].rows.ids)
        return self.chance.sample(living, min(len(living), self.chance.randint(0, most)))

    # --- what may end waits

    def register(self, partition: str) -> None:
        chance = self.chance
        self.clients[0].register(
            partition,
            specs={},
            tasks=TASKS,
            num_samples=chance.choice([None, None, 12, 40]),
            budget_bytes=chance.choice([None, None, 2 * KIB, 4 * KIB]),
            when_full=chance.choice([*c.WhenFull]),
        )

    def reserve(self, partition: str) -> None:
        chance, client = self.chance, self.client()
        if chance.random() < 0.8:
            names = [f"s{self.born + i}" for i in range(chance.randint(1, 4))]
            self.born += len(names)
        else:
            names = self.ids(partition)
        sizes = [chance.choice([0, 64, 64, 200, 1500]) for _ in names]
        update = chance.random() < 0.3
        command = client.allocate(
            {chance.choice(FIELDS): sizes},
            partition,
            update=update,
            timeout_s=chance.choice([3.0, 30.0]),
            on_full=c.OnFull.REJECT if chance.random() < 0.2 else c.OnFull.WAIT,
        )
        call_id = self.post(client, command)
        self.reservations.append((client, call_id, partition, names, sizes))

    def commit(self, partition: str) -> None:
        done = [r for r in self.reservations if isinstance(r[0].result(r[1]), c.Allocated)]
        if not done:
            return self.reserve(partition)
        chosen = self.chance.choice(done)
        self.reservations.remove(chosen)
        client, call_id, partition, names, sizes = chosen
        if not self.chance.randint(0, 9):
            self.post(client, c.Abort(reservation=call_id))
            return None
        allocate = next(
            item.command
            for item in self.driver.log
            if isinstance(item, c.Call) and (item.session, item.call_id) == (client.session, call_id)
        )
        assert isinstance(allocate, c.Allocate)
        columns = commit_columns({allocate.columns[0].name: sizes})
        self.post(
            client,
            c.Commit(
                partition=partition,
                samples=by_ids(*names),
                mode=c.Mode.UPSERT,
                reservation=call_id,
                columns=columns,
                tags=self.tags(len(names)),
            ),
        )
        return None

    def tags(self, count: int) -> tuple[c.TagColumn, ...]:
        chance, found = self.chance, []
        for name, values in (("g", self.groups), ("weight_version", (0, 1, 2, 3)), ("score", (0, 1, 2))):
            if count and chance.random() < 0.8:
                some = sorted(chance.sample(range(count), chance.randint(1, count)))
                drawn = tuple(chance.choice(values) for _ in some)
                found.append(c.TagColumn(name=name, values=drawn, positions=np.array(some)))
        return tuple(found)

    def set_tags(self, partition: str) -> None:
        ids = self.ids(partition)
        self.post(self.client(), c.SetTags(partition=partition, samples=by_ids(*ids), tags=self.tags(len(ids))))

    def clear(self, partition: str) -> None:
        self.post(self.client(), c.Clear(partition=partition, samples=by_ids(*self.ids(partition))))

    def drop(self, partition: str) -> None:
        self.clients[0].call(c.Cleared, c.Clear(partition=partition, samples=None))
        self.register(partition)

    def seal(self, partition: str) -> None:
        self.post(self.client(), c.Seal(partition=partition))

    def version(self, partition: str) -> None:
        self.post(self.client(), c.SetVersion(partition=partition, version=self.chance.randint(0, 4)))

    def read(self, partition: str) -> None:
        if self.located and self.chance.random() < 0.6:
            client, call_id = self.located.pop(self.chance.randrange(len(self.located)))
            self.post(client, c.Release(located=call_id))
            return
        client = self.client()
        call_id = self.post(
            client, c.Locate(partition=partition, samples=by_ids(*self.ids(partition)), fields=(FIELDS[0],))
        )
        self.located.append((client, call_id))

    def after_claim(self, partition: str) -> None:
        done = [held for held in self.claims if isinstance(held[0].result(held[1]), c.Claimed)]
        if not done:
            return
        held = self.chance.choice(done)
        client, call_id, claim = held
        result = client.result(call_id)
        assert isinstance(result, c.Claimed)
        what = {"partition": claim.partition, "task": claim.task, **part_of(result)}
        match self.chance.randint(0, 3):
            case 0:
                self.post(client, c.Ack(**what))
            case 1:
                self.post(client, c.Nack(**what))
            case 2:
                self.post(client, c.Extend(**what, lease_s=self.chance.choice([1.0, 5.0])))
            case 3:
                self.post(client, c.Unclaim(claimed=call_id))
        self.claims.remove(held)

    def units(self, partition: str) -> None:
        unit = self.chance.choice([1, 1, 2])
        if unit not in self.driver.ledger._state.units:
            return
        if self.chance.randint(0, 2):
            self.post(self.client(), c.Drain(unit=unit, undo=bool(self.chance.randint(0, 2)), force=True))
        elif len(self.driver.ledger._state.units) < 4:
            capacity = 2 * KIB
            self.driver.add_unit(name=f"n{self.born}-{len(self.driver.log)}", capacity=capacity, backed=KIB)

    def grown(self, partition: str) -> None:
        for order in self.driver.take_orders():
            if isinstance(order, c.GrowArena):
                self.driver.apply(c.Grown(unit=order.unit, backed_bytes=order.backed_bytes))

    def time(self, partition: str) -> None:
        self.driver.tick(self.driver.now + self.chance.choice([0.1, 0.6, 1.5]))

    def gone(self, partition: str) -> None:
        """A client leaves with all it holds, another comes."""
        place = self.chance.randrange(1, len(self.clients))
        client = self.clients[place]
        self.post(client, c.Bye())
        self.reservations = [r for r in self.reservations if r[0] is not client]
        self.located = [held for held in self.located if held[0] is not client]
        self.claims = [held for held in self.claims if held[0] is not client]
        self.clients[place] = self.driver.client(f"c{len(self.driver.log)}")
        self.clients[place].watermark = 1

    # --- who waits

    def claim(self, partition: str) -> None:
        chance, client = self.chance, self.client()
        more: dict[str, Any] = {}
        if chance.random() < 0.3:
            more["where"] = (c.Predicate(tag="score", op=chance.choice(["<=", "=="]), value=1),)
        if chance.random() < 0.3:
            more["max_lag"] = chance.randint(0, 2)
        if chance.random() < 0.4:
            more["group_size"] = chance.randint(1, 3)
            more["group_by"] = "g"
            if chance.random() < 0.6:
                more["partial_after_s"] = chance.choice([0.0, 0.5, 2.0])
                more["partial"] = chance.choice([*c.Partial])
        unit = more.get("group_size", 1)
        if chance.random() < 0.2:
            self.step += chance.randint(0, 1)
            more |= {"dp_rank": chance.randint(0, 1), "dp_world": 2, "step": self.step}
            unit *= 2
        batch = unit * chance.randint(1, 3)
        command = client.claim(
            batch,
            chance.choice([(), (), ("x",), ("x",), ("x", "y")]),
            partition=partition,
            task=chance.choice(TASKS),
            timeout_s=chance.choice([3.0, 30.0]),
            min_batch_size=chance.choice([None, unit]),
            lease_s=chance.choice([None, None, 0.5, 3.0]),
            blocking=True,
            **more,
        )
        self.claims.append((client, self.post(client, command), command))

    def go(self, steps: int) -> None:
        usual: list[Callable[[str], None]] = [self.claim, self.claim, self.reserve, self.reserve, self.commit]
        usual += [self.commit, self.commit, self.set_tags, self.clear, self.read, self.after_claim, self.after_claim]
        usual += [self.time, self.grown]
        seldom: list[Callable[[str], None]] = [self.seal, self.version, self.version, self.units, self.gone]
        seldom += [self.register, self.register]
        for _ in range(steps):
            act = self.chance.choice(usual if self.chance.random() < 0.95 else seldom)
            act = self.drop if self.chance.random() < 0.003 else act
            act(self.chance.choice(PARTITIONS))


@pytest.mark.parametrize("seed", range(max(2, round(12 * FACTOR))))
def test_nobody_waits_who_could_be_served(seed: int) -> None:
    crowd = Crowd(seed)
    crowd.go(400)
    ledger = crowd.driver.ledger
    assert fingerprint(crowd.driver.replay()) == fingerprint(ledger)
    assert fingerprint(Ledger.restored(ledger.image())) == fingerprint(ledger)
