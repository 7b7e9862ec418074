"""`tq show`."""

from __future__ import annotations

import json

import pytest

from dataplane import DataPlaneClient
from dataplane.cli import main
from tests.cli.service import filled  # noqa: F401

pytestmark = pytest.mark.integration


def test_one_sample(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "b"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sample b of partition train, born ")
    assert "tags: group=g1\nnot produced: logprobs\n" in text
    (ids,) = [line.split() for line in text.splitlines() if line.startswith("ids")]
    assert ids[:9] == ["ids", "jagged", "int64", "inner", "shape", "[]", "2", "16", "B"]
    assert "unclaimed" in text


def test_who_leases_it(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "a", "--partition", "train"]) == 0
    (policy,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy")]
    assert policy.split()[:6] == ["policy", "leased", "by", "rollout-0", "for", "another"]


def test_json(filled: DataPlaneClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "a", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["partition"], told["sample"], told["tags"]) == ("train", "a", {"group": "g0"})
    assert {cell["field"]: cell["length"] for cell in told["cells"]} == {"ids": 5, "reward": 1, "logprobs": 5}
    assert {task["task"]: task["state"] for task in told["tasks"]} == {"policy": "leased", "critic": "unclaimed"}


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
