"""Counts the Python calls of the project's own functions for each of the small operations, by thread: a script.

It prints a JSON object: operation -> thread ("client", "ledger") -> calls per operation. Ticks of the ledger thread are
not counted: how many there are depends on the time.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dataplane
from dataplane import connect, serve

ROOT = str(Path(dataplane.__file__).parent)
OPERATIONS = 200
ROUNDS = 3
"""The least count of these rounds is printed: a round may contain something rare."""


class Counts:
    """Counts calls while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.by_thread: Counter[str] = Counter()
        self._ticking: set[int] = set()  # the threads that are in a tick

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        thread = threading.get_ident()
        if code.co_qualname == "LedgerThread._tick" and event in ("call", "return"):
            (self._ticking.add if event == "call" else self._ticking.discard)(thread)
        elif event == "call" and self.on and code.co_filename.startswith(ROOT) and thread not in self._ticking:
            self.by_thread[threading.current_thread().name] += 1

    def of(self, operation: Callable[[int], object], first: int) -> dict[str, float]:
        """Return the calls of each thread per operation."""
        self.by_thread.clear()
        self.on = True
        for number in range(first, first + OPERATIONS):
            operation(number)
        self.on = False
        names = {"MainThread": "client", "tq-ledger": "ledger"}
        return {names[name]: count / OPERATIONS for name, count in self.by_thread.items() if name in names}


def fields() -> dict[str, Any]:
    """One row of four fields."""
    return {
        "a": torch.arange(100)[None],
        "b": torch.ones(1, 100),
        "c": torch.zeros(1, 1),
        "d": torch.zeros(1, 50, dtype=torch.int32),
    }


def main() -> None:
    counts = Counts()
    threading.setprofile(counts)
    with serve({"capacity_bytes": 256 << 20}) as server:
        sys.setprofile(counts)
        with connect(server.address) as client:
            client.register_partition("p", {}, None, ["t"])
            rows = [fields() for _ in range(OPERATIONS * ROUNDS)]
            for number in range(50):
                client.put_samples([f"w{number}"], "p", fields())
            operations: dict[str, Callable[[int], object]] = {
                "put": lambda number: client.put_samples([f"s{number}"], "p", rows[number]),
                "get": lambda number: client.get_samples([f"s{number}"], "p", ["a", "b", "c", "d"]),
                "claim": lambda number: client.claim_meta("p", "t", ["a"], 1),
                "set_tags": lambda number: client.set_tags([f"s{number}"], "p", [{"x": number}]),
                "clear": lambda number: client.clear_samples([f"s{number}"], "p"),
            }
            found = {}
            for name, operation in operations.items():
                rounds = [counts.of(operation, start * OPERATIONS) for start in range(ROUNDS)]
                found[name] = {thread: min(each[thread] for each in rounds) for thread in ("client", "ledger")}
        sys.setprofile(None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
