"""`rlinf.scheduler.dynamic_scheduler`: its names only, so that RLinf's modules can be imported. Jobs with
`cluster.auto_scheduler` are not supported."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "cluster.auto_scheduler is not supported by workers.rlinf: set it to False, or run on RLinf's own scheduler"
    )
