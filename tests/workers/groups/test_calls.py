"""Results of a group's call, whichever worker ends first."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from workers.groups.calls import GroupCall
from workers.groups.started_group import Called


class Reference:
    """Stands for what Ray gives for a call."""

    def __init__(self) -> None:
        self.ended: Future[str] = Future()

    def future(self) -> Future[str]:
        return self.ended


def test_results_are_in_the_order_of_the_call_whichever_worker_ends_first() -> None:
    references = [Reference() for _ in range(3)]
    calls = [Called(f"talkers:{rank}", cast(Any, one)) for rank, one in enumerate(references)]
    following = GroupCall("Talker.rank", calls, None).then(list)
    for rank in (2, 0, 1):
        assert not following.done()
        references[rank].ended.set_result(f"of {rank}")
    assert following.wait(timeout=60.0) == ["of 0", "of 1", "of 2"]
