"""The commands that look: `tq top`, `tq ls`, `tq show`, `tq why`; those that change one partition; completion."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rich.console import Console

import dataplane
from dataplane import DataPlaneClient, DataPlaneConfig, connect, serve
from dataplane.cli import main
from dataplane.cli.output import ago, size
from dataplane.cli.top import Rates, Snapshot, frame, rates, take_snapshot
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import MIB
from dataplane.ledger import commands as c
from dataplane.storage.unit import StorageUnit
from tests.children import Child
from tests.cli.service import (  # noqa: F401
    TQ,
    complaints,
    filled,
)
from tests.restarts import wait_until

# --- `tq top`, on a terminal and elsewhere.


TOP = [*TQ, "top", "--interval", "0.1"]


@pytest.mark.integration
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


@pytest.mark.integration
def test_who_waits_is_shown(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    waiter = threading.Thread(target=filled.claim_meta, args=("train", "critic", ["logprobs"], 2))
    waiter.start()
    wait_until(lambda: len(filled.waits().waits) == 1)
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    assert "task critic: logprobs" in capsys.readouterr().out
    filled.put_samples(["b"], "train", {"logprobs": [torch.zeros(2)]})
    waiter.join(60)
    assert not waiter.is_alive()


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


# --- `tq ls`.


@pytest.mark.integration
def test_partitions(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        *("partition", "live", "born", "expected", "bytes", "version", "tasks", "fields"),
    ]
    assert row.split()[:4] == ["train", "3", "3", "4"]
    assert row.split()[-2:] == ["policy,critic", "ids,reward,logprobs"]
    assert main(["ls", "--json"]) == 0
    (part,) = json.loads(capsys.readouterr().out)["partitions"]
    assert (part["partition"], part["live"], part["claimed"]) == ("train", 3, {"policy": 1, "critic": 0})


@pytest.mark.integration
def test_no_more_partitions_than_the_limit(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        filled.register_partition(f"more-{number}", ["x"], None, ["t"])
    assert main(["ls", "--limit", "2"]) == 0
    _, *rows, note = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["train", "more-0"]
    assert note == "and 2 more partitions; --limit 4 lists all"
    assert main(["ls", "--limit", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert ([part["partition"] for part in told["partitions"]], told["total"]) == (["train", "more-0"], 4)
    assert main(["ls"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.integration
@pytest.mark.parametrize("verb", ["ls", "status", "top --once --interval 0.1", "why train policy", "clear train --yes"])
def test_a_screen_asks_for_no_more_partitions_than_it_shows(
    verb: str, filled: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[c.Command] = []
    call = ControllerChannel.call

    def noted(channel: ControllerChannel, command: c.Command, *args: Any, **kwargs: Any) -> Any:
        asked.append(command)
        return call(channel, command, *args, **kwargs)

    monkeypatch.setattr(ControllerChannel, "call", noted)
    main(verb.split())
    stats = [command for command in asked if isinstance(command, c.Stats)]
    assert stats
    assert all(command.partitions or command.limit for command in stats)


@pytest.mark.integration
def test_no_partitions_are_said(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    filled.clear_samples(None, "train")
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == "no partitions\n"


@pytest.mark.integration
def test_samples_oldest_first(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "train"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]
    assert rows[0].split()[-3:] == ["ids,reward,logprobs", "-", "group=g0"]
    assert rows[1].split()[-3:] == ["ids,reward", "logprobs", "group=g1"]


@pytest.mark.integration
def test_no_more_than_the_limit(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "train", "--limit", "2"]) == 0
    *_, row, note = capsys.readouterr().out.splitlines()
    assert row.startswith("b ")
    assert note == "the oldest 2 of 3 samples; --limit 3 lists all"
    assert main(["ls", "train", "-n", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total"] == 3
    (sample,) = told["samples"]
    assert sample["sample"] == "a"
    assert sample["fields"] == ["ids", "reward", "logprobs"]
    assert sample["tags"] == {"group": "g0"}
    assert sample["tasks"] == {"policy": "leased", "critic": "unclaimed"}
    assert sample["bytes"] == 5 * 8 + 4 + 5 * 4


@pytest.mark.integration
def test_what_is_not_shown_is_not_fetched(filled: DataPlaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[tuple[str, ...]] = []
    call = ControllerChannel.call

    def watched(channel: ControllerChannel, command: c.Command, *rest: Any, **more: Any) -> tuple[int, c.Result]:
        number, result = call(channel, command, *rest, **more)
        if isinstance(result, c.Listed):
            listed.append(result.ids)
        return number, result

    monkeypatch.setattr(ControllerChannel, "call", watched)
    assert main(["ls", "train", "--limit", "2"]) == 0
    assert listed == [("a", "b")]


@pytest.mark.integration
def test_names_cannot_write_on_the_terminal(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    filled.put_samples(["\x1b[2Jd"], "train", None, tags=[{"note": "\x1b[31m"}])
    assert main(["ls", "train"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert r"'\x1b[2Jd'" in told
    assert r"note='\x1b[31m'" in told


@pytest.mark.integration
def test_an_unknown_partition_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "nope"]) == 1
    assert "unknown partition 'nope'; registered are 'train'" in capsys.readouterr().err


# --- `tq show`.


@pytest.mark.integration
def test_one_sample(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "b"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sample b of partition train, born ")
    assert "tags: group=g1\nnot produced: logprobs\n" in text
    (ids,) = [line.split() for line in text.splitlines() if line.startswith("ids")]
    assert ids[:9] == ["ids", "jagged", "int64", "inner", "shape", "[]", "2", "16", "B"]
    assert "unclaimed" in text


@pytest.mark.integration
def test_who_leases_it(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "a", "--partition", "train"]) == 0
    (policy,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy")]
    assert policy.split()[:6] == ["policy", "leased", "by", "rollout-0", "for", "another"]


@pytest.mark.integration
def test_json(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "a", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["partition"], told["sample"], told["tags"]) == ("train", "a", {"group": "g0"})
    assert {cell["field"]: cell["length"] for cell in told["cells"]} == {"ids": 5, "reward": 1, "logprobs": 5}
    assert {task["task"]: task["state"] for task in told["tasks"]} == {"policy": "leased", "critic": "unclaimed"}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zz"], "the service has no live sample 'zz': it was never put"),
        (["zz", "-p", "train"], "no live sample 'zz'"),
        (["a", "-p", "nope"], "unknown partition 'nope'"),
    ],
)
def test_what_is_not_there_is_exit_1(
    arguments: list[str], said: str, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments]) == 1
    assert said in capsys.readouterr().err


# --- `tq why`.


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["why", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.integration
def test_what_the_latest_claim_wanted_is_the_default(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(["train", "policy"], capsys)
    assert text.startswith("task policy in partition train: of 2 unclaimed live samples 2 have all fields; ")
    assert "1 are claimed, 1 of them on lease" in text
    assert "rollout-0" in text
    assert json.loads(said(["train", "policy", "--json"], capsys))["fields"] == ["ids", "reward"]


@pytest.mark.integration
def test_what_is_missing(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 lack 'logprobs'" in said(["train", "policy", "ids", "logprobs"], capsys)


@pytest.mark.integration
def test_who_waits(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    waiter = threading.Thread(target=filled.claim_meta, args=("train", "critic", ["logprobs"], 2))
    waiter.start()
    wait_until(lambda: len(filled.waits().waits) == 1)
    text = said(["train", "critic"], capsys)
    assert "waiting claims: 1, the longest for " in text
    assert text.endswith("by rollout-0\n")
    told = json.loads(said(["train", "critic", "--json"], capsys))
    assert told["fields"] == ["logprobs"]
    assert told["blocked"]["lacking"] == {"logprobs": 2}
    assert [(wait["client"], wait["wanted"], wait["ready"]) for wait in told["waits"]] == [("rollout-0", 2, 1)]
    assert json.loads(said(["train", "policy", "--json"], capsys))["waits"] == []
    filled.put_samples(["b"], "train", {"logprobs": [torch.zeros(2)]})
    waiter.join(60)
    assert not waiter.is_alive()


@pytest.mark.integration
def test_groups(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["train", "critic", "ids", "--group-size", "2"], capsys)
    assert "0 groups are whole, 3 partial" in text


@pytest.mark.integration
@pytest.mark.parametrize(
    ("condition", "fail"),
    [("group == g1", 1), ("group!=g1", 1), ("age > 3.5", 2), ('group == "g2"', 1), ("age<=null", 2)],
)
def test_conditions(condition: str, fail: int, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(["train", "policy", "--where", condition, "--json"], capsys))["blocked"]
    assert list(told["filtered"].values()) == [fail]
    assert told["matching"] == 2 - fail


@pytest.mark.integration
def test_what_is_no_condition(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "train", "policy", "--where", "group"]) == 2
    assert "'group': expected TAG OPERATOR VALUE" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "text"), [(["nope", "policy"], "partition 'nope'"), (["train", "nope"], "task 'nope'")]
)
def test_what_is_not_there_is_exit_1__why(
    arguments: list[str], text: str, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", *arguments]) == 1
    assert text in capsys.readouterr().err


# --- What shells complete, asked as bash asks.


def completions(line: str, **more: str) -> list[str]:
    words = line.split(" ")
    environment = {
        **os.environ,
        "_TQ_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        **more,
    }
    done = subprocess.run(TQ, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tq ls t", ["train"]),
        ("tq clear --yes ", ["train"]),
        ("tq drop ", ["unit-0"]),
        ("tq checkpoint --partition ", ["train"]),
        ("tq why train ", ["policy", "critic"]),
        ("tq why train policy ids l", ["logprobs"]),
        ("tq serve --checksums a", ["across-hosts", "always"]),
    ],
)
def test_names_of_the_running_service(line: str, found: list[str], filled: DataPlaneClient) -> None:
    assert completions(line) == found


@pytest.mark.integration
def test_a_service_that_the_line_names(filled: DataPlaneClient) -> None:
    assert completions(f"tq ls --address {filled.config.address} ", TQ_ADDRESS="127.0.0.1:1") == ["train"]


@pytest.mark.integration
def test_no_service_is_no_names_and_no_noise() -> None:
    assert completions("tq ls ", TQ_ADDRESS="127.0.0.1:1") == []
    assert completions("tq ls ", TQ_ADDRESS="") == []


HOSTILE = [
    f"train{part}" for part in ("$(touch F)", "`touch F`", ";touch F", "'x", '"x', "\\x", " x", "\nx", "&", "|x")
]
HOSTILE += [f"train{part}" for part in (">x", "*", "?", "[a]", "{a,b}", "!x", "#x", "\x1b[2J", "\u202e")]
HOSTILE += ["~train", "--yes", "-y", "=train"]


@pytest.mark.integration
def test_names_that_mean_something_to_a_shell_are_left_out(filled: DataPlaneClient) -> None:
    for name in HOSTILE:
        filled.register_partition(name, [name], None, [name])
    filled.register_partition("über/a.b-c_1:2", [*HOSTILE, "plain"], None, [*HOSTILE, "plain"])
    assert sorted(completions("tq ls ")) == ["train", "über/a.b-c_1:2"]
    assert completions("tq ls tr") == ["train"]
    assert completions("tq why über/a.b-c_1:2 ") == ["plain"]
    assert completions("tq why über/a.b-c_1:2 plain ") == ["plain"]


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda *_, **__: (shell, f"/bin/{shell}"))
    with pytest.raises(SystemExit) as left:
        main(["--show-completion"])
    assert left.value.code == 0
    assert f"complete_{shell}" in capsys.readouterr().out


# --- Sizes, as people write and read them.


@pytest.mark.parametrize(
    ("text", "count"),
    [("1048576", MIB), ("512k", MIB // 2), ("64m", 64 * MIB), ("1.5GiB", 1536 * MIB), ("2G", 2048 * MIB)],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0.0 s"), (119.0, "119.0 s"), (120.0, "2 min"), (7200.0, "2 h"), (3e5, "3 d"), (float("inf"), "no end")],
)
def test_times(seconds: float, text: str) -> None:
    assert ago(seconds) == text


# --- `tq clear`.


def left(client: DataPlaneClient) -> list[str]:
    return list(client.list_samples("train").sample_ids)


@pytest.mark.integration
def test_samples(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "train", "a", "c"]) == 0
    assert capsys.readouterr().out == "cleared 2 samples of partition train\n"
    assert left(filled) == ["b"]


@pytest.mark.integration
def test_samples_that_are_not_there_are_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "train", "a", "zz", "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == {"partition": "train", "cleared": 1}
    assert told.err == "tq: 1 of 2 samples not found\n"
    assert left(filled) == ["b", "c"]


@pytest.mark.integration
@pytest.mark.parametrize(("answer", "code"), [("", 1), ("n\n", 1), ("y\n", 0)])
def test_a_whole_partition_is_asked_about(
    answer: str,
    code: int,
    filled: DataPlaneClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["clear", "train"]) == code
    told = capsys.readouterr()
    assert "Drop the whole partition train (3 live samples, " in told.err
    assert ("aborted; nothing was changed" in told.err) == bool(code)
    assert bool(filled.stats().partitions) == bool(code)


@pytest.mark.integration
def test_a_whole_partition_without_being_asked(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "train", "--yes"]) == 0
    assert capsys.readouterr().out == "cleared 3 samples of partition train, and the partition itself\n"
    assert not filled.stats().partitions
    assert main(["clear", "train", "--yes"]) == 1
    assert "unknown partition 'train'" in capsys.readouterr().err


# --- `tq drop`.


@pytest.mark.integration
def test_a_unit_without_rows_goes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"capacity_bytes": 8 * MIB, "units": 2}) as server, connect(server.address) as client:
        monkeypatch.setenv("TQ_ADDRESS", server.address)
        first, second = client.stats().units
        assert main(["drop", first.name]) == 0
        assert capsys.readouterr().out == f"dropped storage unit {first.unit} {first.name}\n"
        assert main(["drop", str(second.unit), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {"unit": second.unit, "name": second.name, "live_bytes": 0}
        assert not client.stats().units


@pytest.mark.integration
def test_rows_go_with_force_only(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", "unit-0"]) == 1
    assert "values of 3 live samples" in capsys.readouterr().err
    assert main(["drop", "unit-0", "--force"]) == 0
    assert "of live rows with it" in capsys.readouterr().out
    assert not filled.stats().units
    assert filled.list_samples("train").size == 0


@pytest.mark.integration
def test_no_such_unit_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", "zz"]) == 1
    assert capsys.readouterr().err == "tq: storage unit 'zz': not found; the service has 1 unit-0\n"


@pytest.mark.integration
def test_a_name_that_two_have_is_not_enough(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    with StorageUnit(DataPlaneConfig(capacity_bytes=8 * MIB), str(filled.config.address), name="unit-0"):
        assert main(["drop", "unit-0"]) == 1
        assert "several units have this name, pass an id; the service has 1 unit-0, 2 unit-0" in capsys.readouterr().err


# --- `tq checkpoint` and `tq restore`.


@pytest.mark.integration
def test_checkpoint_and_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "c")
    with dataplane.serve({"capacity_bytes": 8 * MIB}) as server, connect(server.address) as client:
        for name in ("train", "val"):
            client.register_partition(name, ["x"], 2, ["policy"])
            client.put_samples(["a", "b"], name, {"x": torch.arange(2)})
        assert main(["checkpoint", server.address, path, "--partition", "val", "--partition", "train"]) == 0
        assert "checkpoint of val (2 samples), train (2 samples), " in capsys.readouterr().out
        assert main(["restore", server.address, path]) == 1
        told = capsys.readouterr().err
        assert "partition 'val' exists already" in told
        assert "(--partition)" in told
        assert "(--replace)" in told
        assert "=" not in told
        client.clear_samples(["a"], "train")
        client.clear_samples(None, "val")
        assert main(["restore", server.address, path, "--partition", "train", "--replace"]) == 0
        assert capsys.readouterr().out.startswith("restored train (2 samples), ")
        assert client.list_samples("train").sample_ids == ["a", "b"]
        assert [found.partition for found in client.stats().partitions] == ["train"]
        assert main(["checkpoint", server.address, path, "--partition", "none"]) == 1
        assert "unknown partition 'none'" in capsys.readouterr().err
        (tmp_path / "c" / "manifest.json").unlink()
        assert main(["restore", server.address, path]) == 1
        assert "manifest.json: the file is missing" in capsys.readouterr().err
