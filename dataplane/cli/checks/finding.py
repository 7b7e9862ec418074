"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`what` was looked at and what was `found`; `mend` says what to do about it ("": nothing, it is well)."""

    what: str
    found: str
    mend: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is well."""
        return not self.mend


Check = Callable[[], Iterator[Finding]]


def careful(what: str, check: Check, mend: str) -> Iterator[Finding]:
    """What `check` finds, and what it raises as a finding of its own, with this to mend it."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(what=what, found=str(error) or type(error).__name__, mend=mend)
