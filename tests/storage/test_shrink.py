"""Memory given back to the machine, by the whole service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, FieldSpec, Server, connect, serve
from dataplane.cli import main
from dataplane.config import MIB
from dataplane.core.types import FieldKind
from dataplane.ledger import commands as c
from dataplane.storage.arena import HEADER_BYTES
from tests.storage.unit_under_test import Unit

pytestmark = pytest.mark.integration

WAIT_S = 60.0
SMALL = {"capacity_bytes": 128 * MIB}


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(SMALL) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address) as opened:
        opened.register_partition("p", FIELDS, None, ["t"])
        yield opened


FIELDS = {"x": FieldSpec(FieldKind.JAGGED, "uint8", ())}


def rows(number: int, nbytes: int) -> dict[str, list[torch.Tensor]]:
    return {"x": [torch.full((nbytes,), number % 251, dtype=torch.uint8)]}


def read(client: DataPlaneClient, name: str, **more: Any) -> torch.Tensor:
    values: torch.Tensor = client.get_samples([name], "p", ["x"], **more)["x"].values()
    return values


def arena_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.name.startswith("tq-arena-"))


def test_memory_goes_back_and_comes_again(tmp_path: Path) -> None:
    with serve({**SMALL, "arena_dir": str(tmp_path)}) as server, connect(server.address) as client:
        client.register_partition("p", FIELDS, None, ["t"])
        client.put_samples(["keep"], "p", rows(1, MIB))
        client.put_samples(["large"], "p", rows(2, 90 * MIB))
        client.clear_samples(["large"], "p")
        before = arena_bytes(tmp_path)
        assert before > 90 * MIB
        done = client.shrink()
        assert arena_bytes(tmp_path) <= 2 * MIB + HEADER_BYTES
        assert done.given_bytes >= 89 * MIB
        assert [unit.error for unit in done.units] == [""]
        assert read(client, "keep").sum() == MIB
        client.put_samples(["large"], "p", rows(3, 90 * MIB))
        assert read(client, "large").sum() == 3 * 90 * MIB


def test_views_that_are_read_keep_their_memory(client: DataPlaneClient) -> None:
    client.put_samples(["low"], "p", rows(1, MIB))
    client.put_samples(["high"], "p", rows(7, 8 * MIB))
    view = read(client, "high", copy=False)
    client.clear_samples(["low", "high"], "p")
    client.shrink()
    assert view.sum() == 7 * 8 * MIB
    del view
    client.stats()
    assert client.shrink().given_bytes >= 0


@pytest.mark.slow
def test_shrinking_while_others_put_loses_no_row(server: Server, client: DataPlaneClient) -> None:
    """Each row's content derives from its id; memory is given back all the time."""
    wrong: list[str] = []
    shrunk = threading.Semaphore(0)

    def work(first: int) -> None:
        with connect(server.address) as mine:
            for number in range(first, first + 40):
                if number == first + 20:
                    assert shrunk.acquire(timeout=WAIT_S)
                name, nbytes = f"s{number}", 1000 + 77_777 * (number % 9)
                mine.put_samples([name], "p", rows(number, nbytes))
                got = read(mine, name)
                if got.shape != (nbytes,) or not bool((got == number % 251).all()):
                    wrong.append(name)
                if number % 3:
                    mine.clear_samples([name], "p")

    workers = [threading.Thread(target=work, args=(1000 * k,)) for k in range(3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        assert not [unit.error for unit in client.shrink().units if unit.error]
        shrunk.release()
    for worker in workers:
        worker.join()
    assert not wrong
    left = client.list_samples("p")
    assert left.size == 40
    for name in left.sample_ids:
        assert bool((read(client, name) == int(name[1:]) % 251).all())


def test_tq_shrink(server: Server, client: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", server.address]) == 0
    assert "unit-0: 64.0 MiB given back" in capsys.readouterr().out


def test_a_unit_forgets_growth_that_was_ordered_before() -> None:
    with Unit(backed=4 * MIB) as unit:
        unit.server.order(c.GrowArena(unit=7, backed_bytes=32 * MIB))
        unit.server.order(c.ShrinkArena(unit=7, number=1, backed_bytes=MIB))
        reports = [unit.reports.get(timeout=WAIT_S)]
        if isinstance(reports[0], c.Grown):  # it was faster
            assert reports[0].shrinks == 0
            reports = [unit.reports.get(timeout=WAIT_S)]
        assert isinstance(reports[0], c.Shrunk)
        assert (reports[0].number, reports[0].backed_bytes) == (1, MIB)
        unit.server.order(c.GrowArena(unit=7, backed_bytes=8 * MIB))
        grown = unit.expect(c.Grown)
        assert (grown.backed_bytes, grown.shrinks) == (8 * MIB, 1)
        unit.server.order(c.ShrinkArena(unit=7, number=1, backed_bytes=0))
        again = unit.expect(c.Shrunk)
        assert (again.number, again.backed_bytes) == (1, 8 * MIB)


def test_a_file_system_without_holes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("dataplane.storage.arena._punch_hole", fail)
    with Unit(backed=4 * MIB) as unit:
        unit.server.order(c.ShrinkArena(unit=7, number=1, backed_bytes=MIB))
        report = unit.expect(c.Shrunk)
        assert report.error is not None
        assert "not supported" in report.error
