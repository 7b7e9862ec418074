"""`tq ls`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dataplane import DataPlaneClient
from dataplane.cli import main
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.ledger import commands as c
from tests.cli.service import filled  # noqa: F401

pytestmark = pytest.mark.integration


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


def test_no_partitions_are_said(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    filled.clear_samples(None, "train")
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == "no partitions\n"


def test_samples_oldest_first(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "train"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]
    assert rows[0].split()[-3:] == ["ids,reward,logprobs", "-", "group=g0"]
    assert rows[1].split()[-3:] == ["ids,reward", "logprobs", "group=g1"]


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


def test_names_cannot_write_on_the_terminal(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    filled.put_samples(["\x1b[2Jd"], "train", None, tags=[{"note": "\x1b[31m"}])
    assert main(["ls", "train"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert r"'\x1b[2Jd'" in told
    assert r"note='\x1b[31m'" in told


def test_an_unknown_partition_is_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "nope"]) == 1
    assert "unknown partition 'nope'; registered are 'train'" in capsys.readouterr().err
