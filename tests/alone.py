"""Checks in a process of their own: what they count of it, threads and descriptors, is nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.faults.forks import forks

WAIT_S = 300


def alone(check: Callable[..., None], *arguments: Any) -> None:
    """Run a function of a module where no other test ever ran; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=forks) as pool:
        pool.submit(check, *arguments).result(WAIT_S)
