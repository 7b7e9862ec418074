"""The parts of the asynchronous example that need no Ray: spans of time, the loss, what is shown."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dataplane import Flow
from examples.arithmetic.asynchronous import AsyncConfig, BehaviorLoss, Course, JustInTime
from examples.arithmetic.comparison import Run, show
from examples.arithmetic.loss import GRPOLoss
from examples.arithmetic.producer import groups_to_keep
from examples.arithmetic.report import Accuracy
from examples.arithmetic.timeline import Span, common, covered, merged

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)).map(lambda span: (span[0], span[0] + span[1])))


def seconds(spans: list[Span]) -> set[int]:
    """The seconds that spans of whole ones cover."""
    return {second for start, end in spans for second in range(int(start), int(end))}


@given(ones=SPANS, others=SPANS)
def test_spans_are_sets_of_time(ones: list[Span], others: list[Span]) -> None:
    assert covered(ones) == len(seconds(ones))
    assert common(ones, others) == len(seconds(ones) & seconds(others))
    apart = merged(ones)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(apart))


def test_a_course_in_numbers() -> None:
    course = Course(trained=[(2, 5), (6, 8)], waited=[(0, 2), (5, 6)], produced=[(1, 3), (2, 4)], seconds=10)
    course.evicted, course.aborted, course.left = 1, 2, 3
    assert (course.hidden, course.waiting, course.wasted) == (pytest.approx(2 / 3), pytest.approx(0.3), 6)


def test_the_loss_is_relative_to_the_weights_that_sampled() -> None:
    torch.manual_seed(0)
    names = ("token_mask", "advantages", "generation_logprobs", "reference_policy_logprobs")
    batch = {name: torch.rand(3, 5) for name in names}
    logprobs = torch.rand(3, 5)
    loss, metrics = BehaviorLoss(clip=0.1)(logprobs, batch, 7.0)
    expected, others = GRPOLoss(clip=0.1)(logprobs, {**batch, "prev_logprobs": batch["generation_logprobs"]}, 7.0)
    assert loss.equal(expected)
    assert metrics == others
    assert metrics["clipped"] > 0


def test_groups_that_teach_something_come_first() -> None:
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.2]]
    assert groups_to_keep(rewards, 2) == [1, 3]
    assert groups_to_keep(rewards, 3) == [1, 3, 4]
    assert groups_to_keep(rewards, 4) == [0, 1, 3, 4]
    assert groups_to_keep(rewards, 9) == [0, 1, 2, 3, 4]


def test_a_step_is_made_of_whole_calls() -> None:
    assert AsyncConfig(prompts=32, group_size=4).samples == 128
    with pytest.raises(ValueError, match="40 prompts per step must be a multiple of prompts_at_once=32"):
        AsyncConfig(prompts=40)


@pytest.mark.parametrize(
    ("flow", "headroom"),
    [
        (Flow(version=0), 4),
        (Flow(version=0, stored=1, running=2), 1),
        (Flow(version=3, consumed=16), 4),
        (Flow(version=0, consumed=10), 2),
        (Flow(version=9, stored=5), 0),
    ],
)
def test_producers_begin_just_in_time_and_never_beyond_the_window(flow: Flow, headroom: int) -> None:
    assert JustInTime(batch_size=4, window=2, ahead=1).headroom(flow) == headroom


def test_what_is_shown() -> None:
    course = Course(ages=Counter({0: 10, 2: 30}), trained=[(0, 4)], produced=[(0, 2), (4, 6)], waited=[(4, 5)])
    course.seconds, course.evicted, course.spared = 10, 8, 1234
    console = Console(width=120)
    runs = {
        "asynchronous": Run(Accuracy.of([1, 1, 0, 1]), 10.0, 40, [], course),
        "synchronous": Run(Accuracy.of([1, 0, 0, 1]), 20.0, 50, []),
    }
    with console.capture() as captured:
        show(Accuracy.of([0, 1]), runs, console)
    text = captured.get()
    for expected in (
        "50.0% ± 50.0%",
        "took 50% of the time of the synchronous steps",
        "75.0% ± 25.0%",
        "overlap: 50%",
        "waited for samples 10.0% of the run",
        "0       10   25.0%  ██████████",
        "1        0    0.0%",
        "2       30   75.0%",
        "wasted: 8 of 48 samples (8 too old",
        "sampled and not put: 1,234 responses",
    ):
        assert expected in text, text
