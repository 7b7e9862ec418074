"""Checks in a process of their own: what they count of it, threads and descriptors, is nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil

from tests.faults.forks import forks
from tests.restarts import wait_until

WAIT_S = 300


def alone(check: Callable[..., None], *arguments: Any) -> None:
    """Run a function of a module where no other test ever ran; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=forks) as pool:
        pool.submit(check, *arguments).result(WAIT_S)


def leaves_nothing_open(once: Callable[[], None]) -> None:
    """To be called alone: after its first time `once` leaves no thread behind, and no open file."""
    once()
    process = psutil.Process()
    before, threads = process.num_fds(), threading.active_count()
    for _ in range(3):
        once()
    wait_until(lambda: threading.active_count() <= threads, "no more threads than before")
    wait_until(lambda: process.num_fds() <= before, "no more descriptors than before")
