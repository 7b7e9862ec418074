"""`tq clear`."""

from __future__ import annotations

import io
import json

import pytest

from dataplane import DataPlaneClient
from dataplane.cli import main
from tests.cli.service import filled  # noqa: F401

pytestmark = pytest.mark.integration


def left(client: DataPlaneClient) -> list[str]:
    return list(client.list_samples("train").sample_ids)


def test_samples(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "train", "a", "c"]) == 0
    assert capsys.readouterr().out == "cleared 2 samples of partition train\n"
    assert left(filled) == ["b"]


def test_samples_that_are_not_there_are_exit_1(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "train", "a", "zz", "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == {"partition": "train", "cleared": 1}
    assert told.err == "tq: 1 of 2 samples not found\n"
    assert left(filled) == ["b", "c"]


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


def test_a_whole_partition_without_being_asked(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "train", "--yes"]) == 0
    assert capsys.readouterr().out == "cleared 3 samples of partition train, and the partition itself\n"
    assert not filled.stats().partitions
    assert main(["clear", "train", "--yes"]) == 1
    assert "unknown partition 'train'" in capsys.readouterr().err
