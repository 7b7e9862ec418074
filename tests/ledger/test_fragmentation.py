"""Puts of realistic sizes find space although nothing is moved within an arena."""

from __future__ import annotations

import math
from random import Random

from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver

STEPS = 10_000
SMALLEST = 8 << 10
LARGEST = 12 << 20
CAPACITY = 200 * LARGEST
FILL = 0.8
OPEN = 4
"""Partitions that are filled at the same time."""
PUTS = 20
"""Puts into one partition."""


class Run:
    """Rollouts fill several partitions at a time. Of those that are full, every second one is cleared
    at once; the others stay (`late`) until the space is needed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.driver = Driver(capacity=CAPACITY)
        self.client: Client = self.driver.client(attach=[1])
        self.unit = self.driver.ledger._state.units[1]
        self.most = int(FILL * self.unit.limit(update=False))
        self.made = 0
        self.open: dict[str, int] = {}  # with the number of puts to come
        self.late: list[str] = []
        self.rows: dict[str, list[str]] = {}

    def step(self, number: int) -> None:
        """One put into one of the open partitions."""
        while len(self.open) < OPEN:
            self.begin()
        name = self.random.choice(list(self.open))
        self.put(name, number)
        self.open[name] -= 1
        if not self.open[name]:
            del self.open[name]
            if self.random.random() < 0.5:
                self.late.append(name)
            else:
                self.clear(name)

    def begin(self) -> None:
        self.made += 1
        name = f"step{self.made}"
        self.client.register(name)
        self.rows[name] = []
        self.open[name] = PUTS

    def clear(self, name: str) -> None:
        self.client.call(c.Cleared, c.Clear(partition=name, samples=None))
        del self.rows[name]

    def clear_half(self, name: str) -> None:
        gone = self.random.sample(self.rows[name], len(self.rows[name]) // 2)
        self.client.call(c.Cleared, c.Clear(partition=name, samples=c.Samples(ids=tuple(gone))))
        self.rows[name] = [row for row in self.rows[name] if row not in gone]

    def make_room(self, nbytes: int) -> None:
        """Clear one of the oldest late partitions, or half of its rows, until the put fits below `most`."""
        while self.unit.used_bytes + nbytes > self.most:
            name = self.random.choice(self.late[:4])
            if self.random.random() < 0.5:
                self.clear_half(name)
            else:
                self.late.remove(name)
                self.clear(name)

    def put(self, name: str, number: int) -> None:
        """One row or a group, with one to three columns of any size."""
        rows = self.random.choice([1, 1, 1, 4, 8])
        columns = range(self.random.randint(1, 3))
        sizes = {f"x{column}": [self.row_bytes() for _ in range(rows)] for column in columns}
        self.make_room(sum(map(sum, sizes.values())) + len(sizes) * 64)
        ids = [f"s{number}.{row}" for row in range(rows)]
        self.client.put(ids, sizes, partition=name)  # fails unless it is granted at once
        self.rows[name] += ids

    def row_bytes(self) -> int:
        return int(math.exp(self.random.uniform(math.log(SMALLEST), math.log(LARGEST))))


def test_no_put_fails_below_four_fifths_of_the_space_for_new_rows() -> None:
    run = Run(seed=1)
    for number in range(STEPS):
        run.step(number)
