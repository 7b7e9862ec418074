"""`python -m dataplane.compat.transfer_queue ...`: what Python does with the same arguments, with the switch on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dataplane.compat.switch import HOOK, VARIABLE, names_in


def start(name: str) -> NoReturn:
    """Become the interpreter that this process was started as, with the same options, the arguments behind
    `-m NAME` as its own, and `name` of the table of modules in the environment's TQ_REPLACE.

    SystemExit where the hook is not installed, so that the variable would do nothing, and for a wrong value of it.
    """
    if not any((Path(place) / HOOK).is_file() for place in sys.path):
        raise SystemExit(f"{HOOK} is in no directory of sys.path: install the package with `pip install rl-dataplane`")
    try:
        before = names_in(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    value = ",".join(dict.fromkeys([*before, name]))
    command = [sys.executable, *command_without_us(sys.orig_argv, sys.argv)]
    os.execve(sys.executable, command, {**os.environ, VARIABLE: value})


def command_without_us(full: Sequence[str], own: Sequence[str]) -> list[str]:
    """The options and arguments for Python, without `-m` and the module that was started.

    full: the command that Python was started with (`sys.orig_argv`). own: what the module sees of it (`sys.argv`).
    """
    arguments = list(own[1:])
    options = list(full[1 : len(full) - len(arguments)])
    module = options.pop()
    flags = module.partition("m")[0] if module.startswith("-") else options.pop()[:-1]  # "-mNAME", or "-m" before it
    return [*options, *([flags] if flags != "-" else []), *arguments]
