"""A worker class for tests of calls, results and ends. Imports little, so that groups of it start fast."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TwoArguments(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"code {code}: {why}")
        self.code = code


class Member:
    """Answers with its rank. Gates are FIFOs, one per rank, on which it waits until the test opens them."""

    def __init__(self) -> None:
        self._rank = int(os.environ["RANK"])
        self._calls = 0

    def rank(self) -> int:
        return self._rank

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        self._calls += 1
        return self._rank, args, kwargs

    def calls(self) -> int:
        """How often `echo` was called."""
        return self._calls

    def count_to(self, number: int) -> Iterator[int]:
        for value in range(number):  # noqa: UP028 (Ray drives generators with send())
            yield value

    def ranks_of(self, number: int) -> Iterator[int]:
        """Its rank, so many times."""
        for _ in range(number):
            yield self._rank

    def fail_with_two(self) -> None:
        raise TwoArguments(self._rank, "as told")

    def stream_and_fail_with_two(self) -> Iterator[int]:
        yield self._rank
        raise TwoArguments(self._rank, "as told")

    def catch_its_own(self) -> int:
        try:
            self.fail_with_two()
        except TwoArguments as error:
            return error.code
        raise AssertionError("nothing was raised")

    def fail_or_wait(self, rank: int, gates: str) -> int:
        if self._rank == rank:
            raise KeyError("told to fail")
        self.wait_at(gates)
        return self._rank

    def stream_and_fail_or_wait(self, rank: int, gates: str) -> Iterator[int]:
        yield self._rank
        if self._rank == rank:
            raise KeyError("told to fail")
        self.wait_at(gates)

    def wait_at(self, gates: str) -> None:
        with open(Path(gates) / str(self._rank)):
            pass

    def signal_and_wait(self, process: int, gates: str) -> None:
        os.kill(process, signal.SIGUSR1)
        self.wait_at(gates)

    def die(self) -> None:
        os._exit(1)

    def leave(self) -> None:
        """Clean up: leaves a file named after the rank."""
        (Path(os.environ["LEFT"]) / str(self._rank)).touch()

    def leave_or_fail(self) -> None:
        """As `leave`; rank 0 raises."""
        if self._rank == 0:
            raise RuntimeError("rank 0 cannot leave")
        self.leave()

    def wait_and_leave(self) -> None:
        self.wait_at(os.environ["GATES"])
        self.leave()
