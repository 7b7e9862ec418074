"""A Python process on one of the hosts of a test: evaluates what it is told, line by line, and answers in JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from dataplane import connect


def rows(numbers: list[int]) -> dict[str, Any]:
    """Rows of which any reader can tell whose they are."""
    return {"x": [torch.full((2000 + n,), n) for n in numbers]}


def put(client: Any, numbers: list[int]) -> int:
    return int(client.put_samples([f"s{n}" for n in numbers], "p", rows(numbers)).size)


def read(client: Any, numbers: list[int]) -> list[int]:
    """The rows' numbers, each as all of its values say."""
    got = client.get_samples([f"s{n}" for n in numbers], "p", ["x"])["x"].unbind()
    return [int(row[0]) if len(row) == 2000 + int(row[0]) and bool((row == row[0]).all()) else -1 for row in got]


def claim(client: Any, count: int) -> list[str]:
    return list(client.claim_meta("p", "train", ["x"], count, blocking=False).sample_ids)


def main() -> None:
    """Until the input ends."""
    known: dict[str, Any] = {"connect": connect, "put": put, "read": read, "claim": claim}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            exec(line, known)  # noqa: S102 - a test's own code
            answer = {"result": known.get("result")}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
