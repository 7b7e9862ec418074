"""The command line of a storm: its arguments, its parts side by side, and what runs a part again."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable

from tests.faults.books import StormError

Part = tuple[int, int]
"""(k, n): the k-th (from 0) of n storms that share the faults."""
Say = Callable[[str], None]
Storm = Callable[[argparse.Namespace, Part, Say], None]
"""Runs a part; StormError says what was wrong."""


def main(module: str, about: str | None, storm: Storm, *, faults: int | None, which: str) -> int:
    """Run what `sys.argv` asks for; gives the exit code. module: what `python -m` takes; about: its help; faults: how
    many without `--faults`, whose help is `which`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=faults, help=which)
    parser.add_argument("--seed", type=int, default=None, help="decides what happens to whom; random if not given")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for this time")
    parser.add_argument("--parts", type=int, default=1, help="how many storms share the faults and run side by side")
    parser.add_argument("--part", type=int, default=None, help="only this one of them, from 0")
    parser.add_argument("--verbose", action="store_true", help="a line for every fault")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 32)
    if arguments.part is None:
        print(f"{module}: seed {arguments.seed}", flush=True)
        if arguments.parts > 1:
            return _side_by_side(module, arguments)
    return _one(module, arguments, (arguments.part or 0, arguments.parts), storm)


def _side_by_side(module: str, arguments: argparse.Namespace) -> int:
    """Run every part in a process of its own."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--seed", str(arguments.seed)]
    running = [subprocess.Popen([*command, "--part", str(part)]) for part in range(arguments.parts)]
    return max(abs(process.wait()) for process in running)


def _one(module: str, arguments: argparse.Namespace, part: Part, storm: Storm) -> int:
    name = f"part {part[0]}: " if part[1] > 1 else ""
    try:
        storm(arguments, part, lambda text: print(name + text, flush=True))
    except StormError as error:
        again = f"--seed {arguments.seed} --parts {part[1]} --part {part[0]}"
        if arguments.faults is not None:
            again = f"--faults {arguments.faults} {again}"
        print(f"{name}{error}\nagain: python -m {module} {again}", file=sys.stderr)
        return 1
    return 0
