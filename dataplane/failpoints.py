"""Named places where a test may make a process stop, wait or die. Unarmed (always, outside tests) they cost nothing.

A process arms its own: `arm("put.before_commit", action)`; the action runs in the thread that reaches the place.
"""

from __future__ import annotations

from collections.abc import Callable

_armed: dict[str, Callable[[], None]] = {}


def hit(name: str) -> None:
    """Run the action armed at `name`, if any."""
    if _armed:
        action = _armed.get(name)
        if action is not None:
            action()


def arm(name: str, action: Callable[[], None]) -> None:
    """Run `action` whenever `hit(name)` is reached in this process."""
    _armed[name] = action


def disarm() -> None:
    """Forget every armed action."""
    _armed.clear()
