"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The subject of a check (`what`), its result (`found`), and the remedy (`mend`; "" if the check passed)."""

    what: str
    found: str
    mend: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check passed."""
        return not self.mend


Check = Callable[[], Iterator[Finding]]


def run_check(what: str, check: Check, mend: str) -> Iterator[Finding]:
    """Yield the findings of `check`. An exception becomes a failed finding with the remedy `mend`."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(what=what, found=str(error) or type(error).__name__, mend=mend)
