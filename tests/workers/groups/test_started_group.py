"""What ends with the actors of a group, and in which order."""

from __future__ import annotations

from typing import Any, cast

import pytest

from workers.groups import started_group
from workers.groups.started_group import StartedGroup


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has ended so far."""
    ended: list[str] = []

    def kill(actors: list[Any]) -> bool:
        ended.extend(actors)
        return "stuck" not in actors

    monkeypatch.setattr(started_group, "kill", kill)
    return ended


def group_of(ended: list[str], *actors: str) -> StartedGroup:
    group = StartedGroup()
    group.actors += cast(Any, actors)
    group.owners += cast(Any, ["initializer"])
    group.before.callback(ended.append, "name")
    group.before.callback(ended.append, "watch")
    group.after.callback(ended.append, "bundles")
    group.after.callback(ended.append, "ports")
    return group


def test_a_group_ends_once_and_says_whether_all_were_killed(ended: list[str]) -> None:
    group = group_of(ended, "first", "stuck")
    assert group.end() is False
    assert ended == ["watch", "name", "first", "stuck", "initializer", "ports", "bundles"]
    assert (group.actors, group.owners) == ([], [])
    assert group.end() is True
    assert len(ended) == 7


def test_a_start_that_fails_ends_what_was_started(ended: list[str]) -> None:
    group = group_of(ended, "first")
    with pytest.raises(KeyError, match="told to fail"), group.starting():
        raise KeyError("told to fail")
    assert ended == ["watch", "name", "first", "initializer", "ports", "bundles"]


def test_what_goes_wrong_at_the_end_keeps_nothing_alive(ended: list[str]) -> None:
    group = group_of(ended, "first")
    group.before.callback(lambda: pytest.fail("no answer"))
    with pytest.raises(pytest.fail.Exception, match="no answer"):
        group.end()
    assert ended == ["watch", "name", "first", "initializer", "ports", "bundles"]
