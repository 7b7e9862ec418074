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
    assert text.startswith("task policy in partition train: of 2 unclaimed live samples 2 have all fields; ")
    assert "1 are claimed, 1 of them on lease" in text
    assert "rollout-0" in text
    assert json.loads(said(["train", "policy", "--json"], capsys))["fields"] == ["ids", "reward"]


def test_what_is_missing(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 lack 'logprobs'" in said(["train", "policy", "ids", "logprobs"], capsys)


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


def test_groups(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["train", "critic", "ids", "--group-size", "2"], capsys)
    assert "0 groups are whole, 3 partial" in text


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


@pytest.mark.parametrize(
    ("arguments", "text"), [(["nope", "policy"], "partition 'nope'"), (["train", "nope"], "task 'nope'")]
)
def test_what_is_not_there_is_exit_1(
    arguments: list[str], text: str, filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", *arguments]) == 1
    assert text in capsys.readouterr().err
