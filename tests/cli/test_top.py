"""`tq top`, on a terminal and elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import signal
import sys
import threading

import pytest
import torch
from msgspec.structs import replace
from rich.console import Console

from dataplane import DataPlaneClient
from dataplane.cli import main
from dataplane.cli.top import Rates, Snapshot, frame, rates, take_snapshot
from dataplane.client.rpc.channel import ControllerChannel
from tests.children import Child
from tests.cli.service import TQ, complaints, filled  # noqa: F401
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

TOP = [*TQ, "top", "--interval", "0.1"]


def test_once(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "1 client   0 calls waiting" in text
    rows = [line.split() for line in text.splitlines() if line]
    assert ["train", "3"] in [row[:2] for row in rows]
    assert ["policy", "train", "2", "1", "0", "1", "-", "0", "ids,", "reward"] in rows
    (critic,) = [row for row in rows if row[0] == "critic"]
    assert critic[-4:] == ["0", "(has", "not", "claimed)"]


def test_who_waits_is_shown(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    waiter = threading.Thread(target=filled.claim_meta, args=("train", "critic", ["logprobs"], 2))
    waiter.start()
    wait_until(lambda: len(filled.waits().waits) == 1)
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    assert "task critic: logprobs" in capsys.readouterr().out
    filled.put_samples(["b"], "train", {"logprobs": [torch.zeros(2)]})
    waiter.join(60)
    assert not waiter.is_alive()


def test_without_a_version_there_is_no_lag(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    filled.set_tags(["b", "c"], "train", [{"weight_version": 354}] * 2)
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    (policy,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy")]
    assert "version not set" in policy
    assert "354" not in policy
    filled.set_version("train", 356)
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["policy", "train", "2", "1", "0", "1", "2", "0", "ids,", "reward"] in rows


def test_many_units_leave_space_for_the_rest(filled: DataPlaneClient) -> None:
    with contextlib.closing(ControllerChannel.open(filled.config)) as channel:
        seen = take_snapshot(channel)
    (unit,) = seen.report.units
    units = [replace(unit, unit=n, used_bytes=n * unit.capacity_bytes // 200) for n in range(1, 129)]
    units[6] = replace(units[6], connected=False)
    many = dataclasses.replace(seen, report=replace(seen.report, units=tuple(units)))
    assert [line.split()[0] for line in lines_of_units(many, None)] == [str(n) for n in range(1, 129)]
    *shown, left = lines_of_units(many, 5)
    assert [line.split()[0] for line in shown] == ["7", "125", "126", "127", "128"]
    assert left == "and 123 more units; `tq status` lists them"


def lines_of_units(seen: Snapshot, most: int | None) -> list[str]:
    """What `tq top` says of them."""
    printed = Console(width=150, file=io.StringIO())
    printed.print(frame("here:1", seen, seen, most_units=most))
    lines = printed.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [line.rstrip() for line in lines[3 : lines.index("", 3)]]


def test_rates_are_of_what_came_and_went(filled: DataPlaneClient) -> None:
    channel = ControllerChannel.open(filled.config)
    try:
        before = take_snapshot(channel)
        filled.put_samples(["d"], "train", {"reward": torch.zeros(1)})
        filled.clear_samples(["a", "b", "c"], "train")
        filled.register_partition("new", ["x"], None, ["t"])
        after = take_snapshot(channel)
    finally:
        channel.close()
    seconds = after.at_s - before.at_s
    found = rates(before, after)
    assert found["train"].born == pytest.approx(1 / seconds)
    assert found["train"].dropped == pytest.approx(3 / seconds)
    assert found["train"].grown_bytes is not None
    assert found["train"].grown_bytes < 0
    assert found["new"] == Rates()


def test_json_goes_on_line_by_line_until_interrupted(filled: DataPlaneClient) -> None:
    with Child([*TOP, "--json"]) as process:
        for _ in range(2):
            told = json.loads(process.line())
            assert told["seconds"] > 0
            assert told["report"]["partitions"][0]["partition"] == "train"
            assert told["rates"]["train"]["born"] == 0
        process.send_signal(signal.SIGINT)
        code, _, errors = process.finish()
    assert (code, complaints(errors)) == (0, [])


def test_a_terminal_shows_it_in_place_until_interrupted(filled: DataPlaneClient) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with Child(TOP, env=environment, terminal=theirs) as process:
        os.close(theirs)
        seen = b""
        while b"policy" not in seen:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # the other end is closed
            pass
        assert process.wait(60) == 0
    os.close(ours)
    assert b"\x1b[?1049h" in seen  # another screen, and back from it
    assert b"\x1b[?1049l" in seen
    assert b"Traceback" not in seen


def test_a_service_that_goes_is_exit_1(filled: DataPlaneClient) -> None:
    address = filled.config.address
    code = "from dataplane import serve\nwith serve({'units': 0}) as s:\n print(s.address, flush=True)\n input()"
    with Child([sys.executable, "-c", code]) as service:
        other = service.line()
        assert other != address
        with Child([*TOP, other, "--json"]) as process:
            assert json.loads(process.line())["report"]["units"] == []
            service.finish("\n")
            exit_code, _, errors = process.finish()
    assert exit_code == 1
    (line,) = complaints(errors)
    assert line.startswith(f"tq: no data plane service at {other}")
