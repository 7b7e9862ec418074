"""`tq status`."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from msgspec.structs import replace

from dataplane import connect, serve
from dataplane.cli import main
from dataplane.config import MIB
from dataplane.ledger import commands as c

UNIT = c.UnitStats(
    unit=3,
    name="left",
    host="here",
    connected=True,
    capacity_bytes=1000,
    unbacked_bytes=50,
    free_bytes=243,
    reserved_bytes=202,
    live_bytes=101,
    retired_bytes=404,
    pinned_bytes=55,
    used_bytes=707,
    peak_used_bytes=808,
)
PARTITION = c.PartitionStats(
    partition="train",
    live=5,
    born=7,
    num_samples=9,
    sealed=True,
    live_bytes=111,
    produced={"x": 4, "y": 3},
    claimed={"policy": 2},
    waiting_claims=14,
    version=None,
    dropped=0,
    used_bytes=222,
    peak_used_bytes=333,
    budget_bytes=444,
    evicted=11,
    evicted_unconsumed=12,
    waiting_puts=13,
    pressed=True,
)
SESSION = c.SessionStats(
    session=1, name="me", host="here", state="live", silent_s=0.0, parked=0, reservations=0, pins=0
)
FULL = replace(UNIT, unit=4, connected=False, pressed=True, draining=True, problem="no memory")
PLAIN = c.PartitionStats(
    partition="plain",
    live=1,
    born=8,
    num_samples=None,
    sealed=False,
    live_bytes=64,
    produced={},
    claimed={},
    waiting_claims=0,
    version=None,
    dropped=0,
)
REPORT = c.StatsReport(
    epoch=6,
    now=0.0,
    units=(UNIT, FULL),
    partitions=(PARTITION, PLAIN),
    sessions=(SESSION, SESSION),
    waiting_allocations=15,
    partition_count=18,
)
"""Figures that could be taken for each other differ."""
SAID = """\
data plane service at here:1, epoch 6
  unit 3 left: 707 B of 1000 B used (101 B live, 202 B reserved, 55 B pinned), peak 808 B
  unit 4 left: 707 B of 1000 B used (101 B live, 202 B reserved, 55 B pinned), peak 808 B, FILLING UP, DRAINING, \
NOT CONNECTED
    cannot grow: no memory
  partition train: 5 live (111 B), 7 of 9 born, sealed
    222 B of a budget of 444 B used, peak 333 B, FILLING UP
    11 evicted, plus 12 evicted unconsumed
    13 puts waiting for space
    field x: 4 produced
    field y: 3 produced
    task policy: 2 of 5 claimed
    14 claims waiting
  partition plain: 1 live (64 B), 8 born
  and 16 more partitions; `tq ls` lists them
  2 sessions, 15 puts waiting for space"""


def test_every_figure_stands_where_it_belongs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.cli.inspection.session", contextlib.nullcontext)
    monkeypatch.setattr("dataplane.cli.inspection.stats", lambda _: REPORT)
    assert main(["status", "here:1"]) == 0
    assert capsys.readouterr().out == f"{SAID}\n"


@pytest.mark.integration
def test_partitions_fields_and_tasks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        client.register_partition("train", ["x"], 4, ["policy"], budget_bytes=MIB)
        client.put_samples(["a", "b"], "train", {"x": torch.arange(2)})
        client.claim_meta("train", "policy", ["x"], 1)
        monkeypatch.setenv("TQ_ADDRESS", server.address)
        assert main(["status"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"data plane service at {server.address}, epoch ")
        for part in (
            "partition train: 2 live (64 B), 2 of 4 born",
            "64 B of a budget of 1.0 MiB used",
            "field x: 2 produced",
            "task policy: 1 of 2 claimed",
        ):
            assert part in text
        assert main(["status", "--json", "--address", server.address]) == 0
        assert json.loads(capsys.readouterr().out)["partitions"][0]["produced"] == {"x": 2}
