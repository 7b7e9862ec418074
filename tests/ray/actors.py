"""Worker classes that the tests start by name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any


class Echo:
    """Says what it was told and where it is."""

    def __init__(self, greeting: str = "hello", fail_on_rank: int | None = None) -> None:
        self.greeting = greeting
        self.cleaned = False
        if fail_on_rank is not None and self.rank() == fail_on_rank:
            raise ValueError("this constructor always fails")

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank(), args, kwargs

    def count_to(self, number: int) -> Iterator[int]:
        for value in range(number):  # noqa: UP028 (Ray drives generators with send())
            yield value

    def fail_on(self, rank: int) -> int:
        if self.rank() == rank:
            raise KeyError("told to fail")
        return self.rank()

    def stop(self) -> None:
        if self.rank() == 0:
            raise RuntimeError("rank 0 cannot stop")

    def hang(self) -> None:
        time.sleep(600)


class Configured(Echo):
    @staticmethod
    def configure_worker(
        num_gpus: float, bundle_indices: tuple[int, list[int]] | None
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        return {"num_cpus": 0}, {"CONFIGURED": str(bundle_indices), "SHARED": "class"}, {"greeting": "configured"}

    def greet(self) -> str:
        return self.greeting
