"""Pauses between attempts."""

from __future__ import annotations

import random

import pytest

from dataplane.core import durations
from dataplane.core.durations import Backoff


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jitter."""
    monkeypatch.setattr(durations, "jittered", lambda pause_s: pause_s)


@pytest.mark.usefixtures("exact")
def test_each_pause_is_twice_the_last_up_to_the_longest() -> None:
    pauses = Backoff(0.1, 0.5)
    assert [pauses.take() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    pauses.reset()
    assert (pauses.next_s, pauses.take(), pauses.next_s) == (0.1, 0.1, 0.2)


@pytest.mark.usefixtures("exact")
def test_a_bound_shortens_one_pause_only() -> None:
    pauses = Backoff(1.0, 8.0)
    assert [pauses.take(0.3), pauses.take(), pauses.take(3.0), pauses.take()] == [0.3, 2.0, 3.0, 8.0]


def test_jitter_takes_up_to_half_and_nothing_from_the_programs_random_numbers() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    pauses = {Backoff(1.0, 1.0).take() for _ in range(50)}
    assert random.random() == expected
    assert len(pauses) > 25
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
