"""A dict that drops its oldest entries."""

from __future__ import annotations

from dataplane.core.bounded import Bounded


def test_what_is_stored_again_is_the_latest_and_the_oldest_goes() -> None:
    kept: Bounded[str, int] = Bounded(2)
    assert [kept.store("a", 1), kept.store("b", 2), kept.store("a", 3)] == [None, None, None]
    assert kept.store("c", 4) == 2
    assert list(kept.items()) == [("a", 3), ("c", 4)]
