"""MultiWorkerFuture on stored values: which results come back, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from workers import MultiWorkerFuture

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
TIED = {0: 0, 1: 0, 2: 1, 3: 1}


def results(values: list[Any], tied: dict[int, int] = TIED, **kwargs: Any) -> list[Any]:
    group = SimpleNamespace(worker_to_tied_group_index=tied, worker_metadata=[])
    return MultiWorkerFuture([ray.put(value) for value in values], **kwargs).get_results(group)


def test_the_first_worker_of_each_tied_group_answers() -> None:
    assert results(["a", "b", "c", "d"]) == ["a", "c"]
    assert results(["a", "b", "c", "d"], tied={worker: worker for worker in range(4)}) == ["a", "b", "c", "d"]


def test_the_first_of_those_called() -> None:
    assert results(["b", "d"], called_workers=[1, 3]) == ["b", "d"]
    assert results(["b", "c", "d"], called_workers=[1, 2, 3]) == ["b", "c"]


def test_those_asked_for_answer_tied_or_not_in_worker_order() -> None:
    assert results(["a", "b", "c", "d"], return_from_workers=[3, 0, 1]) == ["a", "b", "d"]
    assert results(["b", "d"], called_workers=[1, 3], return_from_workers=[3, 0]) == ["d"]
    assert results(["d", "a"], called_workers=[3, 0], return_from_workers=[0, 3]) == ["a", "d"]
    assert results(["d", "a"], called_workers=[3, 0]) == ["a", "d"]


def test_nobody_called() -> None:
    assert results([]) == []
    assert results(["a"], return_from_workers=[]) == []


def test_futures_and_workers_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="2 futures for 1 called workers"):
        results(["a", "b"], called_workers=[0])
    with pytest.raises(
        ValueError, match="worker 0 is in no tied group of this worker group, which may have been shut down"
    ):
        results(["a"], tied={})
    assert results(["a"], tied={}, return_from_workers=[0]) == ["a"]
