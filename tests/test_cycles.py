"""Ten thousand puts and clears of mixed sizes: whatever they need, they need it once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import torch

from dataplane import DataPlaneClient, FieldSpec, connect, serve
from dataplane.config import MIB
from dataplane.core.types import FieldKind
from dataplane.ledger import commands as c
from tests.alone import alone
from tests.ledger.driver import Client, Driver
from tests.restarts import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

KIB = 1024
FIELDS = {"x": FieldSpec(FieldKind.JAGGED, "uint8", ()), "y": FieldSpec(FieldKind.JAGGED, "uint8", ())}


def sizes_of(random: random.Random, rows: int) -> list[int]:
    """From nothing to some pages."""
    return [int(random.choice([0, 1, 63, 64, 65, 200, 1000, 5000]) * random.uniform(0.5, 2.0)) for _ in range(rows)]


def cycle(client: Client, number: int, random: random.Random) -> None:
    """A put, now and then updated, read, claimed, or aborted, and cleared in two parts."""
    ids = [f"s{number}.{row}" for row in range(random.randint(1, 4))]
    index = [0] * len(ids) if number % 6 == 0 else None
    sizes = sizes_of(random, 1 if index else len(ids))
    client.put(ids, {"x": sizes}, index=index)
    if number % 10 == 0:
        client.put(c.Samples(ids=tuple(ids)), {"y": sizes_of(random, len(ids))}, mode=c.Mode.UPDATE)
    if number % 15 == 0:
        client.claimed(len(ids), ["x"], timeout_s=0.0, lease_s=5.0 if number % 2 else None)
    if number % 21 == 0:
        client.do(c.Abort(reservation=client.post(client.allocate({"x": sizes_of(random, 3)}))))
    located = None
    if number % 8 == 0:
        located = client.post(c.Locate(partition="p", samples=c.Samples(ids=tuple(ids[:2])), fields=("x",)))
        client.clear(*ids[1:])
    client.clear(*ids)
    if located:
        client.do(c.Release(located=located))


def tracked(driver: Driver) -> dict[str, int]:
    """How long everything is that the ledger keeps."""
    state = driver.ledger._state
    found: dict[str, int] = {"image": len(driver.ledger.image())}
    for name, value in {**vars(state), **vars(state.extents), **vars(state.units[1].space)}.items():
        if hasattr(value, "__len__"):
            found[name] = len(value)
    for partition in state.partitions.values():
        for name, value in {**vars(partition), **vars(partition.rows)}.items():
            if hasattr(value, "__len__"):
                found[f"{partition.name}.{name}"] = len(value)
    for session in state.sessions.values():
        found.update(
            {f"session.{name}": len(value) for name, value in vars(session).items() if isinstance(value, dict)}
        )
    return found


def growth(state: Callable[[], dict[str, int]], cycles: Callable[[range], None]) -> dict[str, tuple[int, int]]:
    """What is larger after ten thousand cycles than it was after two thousand, by more than noise."""
    cycles(range(2_000))
    before = state()
    cycles(range(2_000, 10_000))
    after = state()
    return {name: (before[name], size) for name, size in after.items() if size > before.get(name, 0) * 1.1 + 64}


def test_ten_thousand_cycles_leave_nothing_in_the_ledger() -> None:
    driver = Driver(capacity=MIB)
    client = driver.client()
    client.register(tasks=("train", "score"), budget_bytes=MIB // 2, when_full=c.WhenFull.EVICT)
    chance = random.Random(7)

    def cycles(numbers: range) -> None:
        for number in numbers:
            cycle(client, number, chance)
            driver.answers.clear()
            client.open.clear()
            driver.log.clear()
            if number % 100 == 0:
                driver.tick(number / 10)
                driver.take_orders()
        driver.tick(numbers.stop / 10)

    larger = growth(lambda: tracked(driver), cycles)
    assert not larger
    assert client.used() == 0
    assert driver.ledger.free_ranges(1) == [(0, MIB)]
    assert driver.ledger._state.partitions["p"].account.used_bytes == 0
    assert client.unit().peak_used_bytes < MIB // 2


def test_ten_thousand_partitions_leave_nothing_in_the_ledger() -> None:
    driver = Driver(capacity=MIB)
    client = driver.client()

    def cycles(numbers: range) -> None:
        for number in numbers:
            client.register(budget_bytes=MIB // 4)
            if number % 4 == 0:
                client.put(["a", "b"], {"x": [number % 997, 5]})
                client.locate(c.Samples(ids=("a",)))
                located = client.last_call_id
            client.call(c.Cleared, c.Clear(partition="p", samples=None))
            if number % 4 == 0:
                client.do(c.Release(located=located))
            driver.answers.clear()
            client.open.clear()
            driver.log.clear()

    assert not growth(lambda: tracked(driver), cycles)
    assert client.used() == 0


def blocks(folder: str) -> int:
    """What our arenas take of the machine's memory."""
    return sum(entry.stat().st_blocks * 512 for entry in files(folder) if entry.name.startswith("tq-arena-"))


def files(folder: str) -> Iterator[os.DirEntry[str]]:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from files(entry.path)
        else:
            yield entry


def churn(client: DataPlaneClient, numbers: range) -> None:
    """Puts of mixed sizes, read now and then, a window of them alive."""
    chance = np.random.default_rng(3)
    for number in numbers:
        size = int(chance.choice([0, 10, 500, 4_000, 40_000, 400_000]))
        client.put_samples([f"s{number}"], "p", {"x": [torch.zeros(size, dtype=torch.uint8)]})
        if number % 10 == 0:
            client.get_samples([f"s{number}"], "p", ["x"])
        client.clear_samples([f"s{number - 3}"], "p")
    client.clear_samples([f"s{number}" for number in range(numbers.stop - 3, numbers.stop)], "p")


def test_the_service_needs_no_more_after_many_cycles(tmp_path: os.PathLike[str]) -> None:
    alone(_serve_many_cycles, str(tmp_path))


def _serve_many_cycles(folder: str) -> None:
    me = psutil.Process()
    with (
        serve({"capacity_bytes": 64 * MIB, "arena_dir": folder}) as server,
        connect(server.address, result_memory_bytes=MIB) as client,
    ):
        client.register_partition("p", FIELDS, None, ["t"])
        churn(client, range(200))
        took, fds, threads, rss = blocks(folder), me.num_fds(), me.num_threads(), me.memory_info().rss
        churn(client, range(200, 700))
        assert blocks(folder) == took
        wait_until(lambda: me.num_fds() <= fds and me.num_threads() <= threads, "no more descriptors and threads")
        assert me.memory_info().rss < rss + 32 * MIB
        assert client.stats().partitions[0].used_bytes == 0
        client.close()
        with connect(server.address) as last:
            wait_until(lambda: not last.stats().units[0].reserved_bytes, "what the first kept ahead is free")
