"""Every target on fixed examples. `TQ_EXAMPLES=N` tries N times as many, fresh ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from tests.fuzz.mutation import inputs
from tests.fuzz.target import Standing, Target
from tests.fuzz.targets import TARGETS
from tests.profiles import budget

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _services() -> Iterator[None]:
    yield
    Standing.end_all()


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_only_named_errors_and_little_memory(target: Target) -> None:
    seeds = target.seeds()

    @budget(target.examples)
    @given(inputs(seeds))
    def attempt(data: bytes) -> None:
        target.attempt(data)

    for seed in seeds:
        target.attempt(seed)
    attempt()
