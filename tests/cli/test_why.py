"""`tq why`."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from dataplane import DataPlaneClient
from dataplane.cli import main
from tests.cli.service import filled  # noqa: F401
from tests.restarts import wait_until

pytestmark = pytest.mark.integration


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["why", *arguments]) == 0
    return capsys.readouterr().out


def test_what_the_latest_claim_wanted_is_the_default(
    filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(["train", "policy"], capsys)
    assert text.startswith("task policy in partition train can claim 2 samples with ids, reward now: of 2 unclaimed")
    counts = {line[:-9].strip(): line.split()[-1] for line in text.splitlines()[2:] if line}
    assert counts["live and not claimed by the task"] == "2"
    assert counts["on lease"] == "1"
    assert "rollout-0" in text


def test_what_is_missing(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["train", "policy", "ids", "logprobs"], capsys)
    assert "would wait, because no sample with ids, logprobs is ready" in text
    assert "2 lack 'logprobs'" in text
    assert "lack logprobs" in text


def test_who_waits(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    waiter = threading.Thread(target=filled.claim_meta, args=("train", "critic", ["logprobs"], 2))
    waiter.start()
    wait_until(lambda: len(filled.waits().waits) == 1)
    text = said(["train", "critic"], capsys)
    assert "task critic in partition train waits: 1 claim of at least 2, and 1 sample with logprobs ready" in text
    assert "times out in" in text
    told = json.loads(said(["train", "critic", "--json"], capsys))
    assert told["fields"] == ["logprobs"]
    assert told["blocked"]["lacking"] == {"logprobs": 2}
    assert [(wait["client"], wait["wanted"], wait["ready"]) for wait in told["waits"]] == [("rollout-0", 2, 1)]
    assert json.loads(said(["train", "policy", "--json"], capsys))["waits"] == []
    filled.put_samples(["b"], "train", {"logprobs": [torch.zeros(2)]})
    waiter.join(60)
    assert not waiter.is_alive()


def test_groups(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["train", "critic", "ids", "--group-size", "2"], capsys)
    assert "would wait" in text
    assert "partial groups" in text


@pytest.mark.parametrize(
    ("condition", "fail"),
    [("group == g1", 1), ("group!=g1", 1), ("age > 3.5", 2), ('group == "g2"', 1), ("age<=null", 2)],
)
def test_conditions(condition: str, fail: int, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(["train", "policy", "--where", condition, "--json"], capsys))["blocked"]
    assert list(told["filtered"].values()) == [fail]
    assert told["matching"] == 2 - fail


def test_what_is_no_condition(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "train", "policy", "--where", "group"]) == 2
    assert "'group': expected TAG OPERATOR VALUE" in capsys.readouterr().err


def test_nothing_is_left(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    filled.seal("train")
    filled.claim_meta("train", "policy", ["ids"], 2)
    assert "has nothing left to claim" in said(["train", "policy"], capsys)


@pytest.mark.parametrize(
    ("arguments", "text"), [(["nope", "policy"], "partition 'nope'"), (["train", "nope"], "task 'nope'")]
)
def test_what_is_not_there_is_exit_1(
    arguments: list[str], text: str, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", *arguments]) == 1
    assert text in capsys.readouterr().err
