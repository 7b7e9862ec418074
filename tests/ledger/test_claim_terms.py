"""What tells kinds of waiting claims apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.ledger.commands import Claim, Predicate, WhyBlocked
from dataplane.ledger.state.tasks import kind_of

READY_INDEX: Any = SimpleNamespace(task=SimpleNamespace(name="train"), fields=("x",))
COMMON: dict[str, Any] = {"partition": "p", "task": "train", "fields": ("x",), "batch_size": 2}
OTHER: dict[str, dict[str, Any]] = {
    "where": {"where": (Predicate(tag="reward", op=">", value=0.5),)},
    "group_by": {"group_by": "prompt", "group_size": 2},
    "group_size": {"group_size": 4},
    "max_lag": {"max_lag": 0},
    "version_tag": {"version_tag": "version", "max_lag": 1},
}
"""By option that decides which samples a claim takes: terms on which it waits for others than its neighbour does."""


def test_there_are_terms_of_every_option_that_decides() -> None:
    assert set(OTHER) == set(WhyBlocked.__struct_fields__) - {"partition", "task", "fields"}


@pytest.mark.parametrize("option", OTHER)
def test_claims_on_other_terms_are_of_another_kind(option: str) -> None:
    terms = OTHER[option]
    rest = {name: value for name, value in terms.items() if name != option}
    assert kind_of(READY_INDEX, Claim(**COMMON, **terms)) != kind_of(READY_INDEX, Claim(**COMMON, **rest))
