"""Ctrl-C at chosen bytecodes of the package's own code, or of others. For a process of its own, in its main thread."""

from __future__ import annotations

import _thread
import collections
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import dataplane

PACKAGE = str(Path(dataplane.__file__).parent)


def bytecodes_of(call: Callable[[], Any], stop_at: int = 0, *, within: tuple[str, ...] = (PACKAGE,)) -> int:
    """Makes the call; how many bytecodes of the folders `within` it took in this thread. At bytecode
    `stop_at`, counted from 1, SIGINT becomes pending: KeyboardInterrupt is raised where the interpreter looks for
    signals next, as after a real Ctrl-C, and never between `__enter__` or `__exit__` of a lock and the `with` block."""
    done = 0
    pending: collections.defaultdict[int, Any] = collections.defaultdict(_thread.interrupt_main)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal done
        if not frame.f_code.co_filename.startswith(within):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            done += 1
            if done == stop_at:
                sys.settrace(None)
                frame.f_trace = None
                # A subscript, as the interpreter looks for signals after every call: none may follow in this function.
                pending[0]
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return done


def samples(total: int, most: int) -> Iterator[int]:
    """At most `most` bytecodes of `total`, evenly spread, the same in every run."""
    for number in range(min(total, most)):
        yield 1 + number * total // min(total, most)


def interrupt_everywhere(
    call: Callable[[], Any], most: int, after: Callable[[int], None], *, within: tuple[str, ...] = (PACKAGE,)
) -> int:
    """The call again and again, each time interrupted at another bytecode, then `after`. How many interrupts came."""
    call()
    total = max(bytecodes_of(call, within=within), bytecodes_of(call, within=within))
    came = 0
    for step in samples(total, most):
        try:
            bytecodes_of(call, step, within=within)
        except KeyboardInterrupt:
            came += 1
        after(step)
    return came
