"""`python -m dataplane.compat.transfer_queue ...`: run Python with the remaining arguments and the switch on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dataplane.compat.switch import HOOK, VARIABLE, names_in


def start(name: str) -> NoReturn:
    """Replace this process by the same interpreter with the same options and the arguments after `-m NAME`, and with
    `name` (a module of the switch's table) added to TQ_REPLACE.

    Raises SystemExit if the hook is not installed, because the variable then has no effect, and for an invalid value of
    the variable.
    """
    if not any((Path(directory) / HOOK).is_file() for directory in sys.path):
        raise SystemExit(f"{HOOK} was not found on sys.path: install the package with `pip install` (see README.md)")
    try:
        names = names_in(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    value = ",".join(dict.fromkeys([*names, name]))
    command = [sys.executable, *python_arguments(sys.orig_argv, sys.argv)]
    os.execve(sys.executable, command, {**os.environ, VARIABLE: value})


def python_arguments(command_line: Sequence[str], module_arguments: Sequence[str]) -> list[str]:
    """Return the options and arguments for Python, without `-m` and the name of the started module.

    command_line: that of this process (`sys.orig_argv`). module_arguments: its name and arguments (`sys.argv`).
    """
    arguments = list(module_arguments[1:])
    options = list(command_line[1 : len(command_line) - len(arguments)])
    # The last option starts the module. Other flags can precede its "m", as in "-um": they are kept.
    last = options.pop()
    if last.startswith("-"):  # "-mNAME"
        flags = last.partition("m")[0]
    else:  # "-m" and "NAME"
        flags = options.pop().removesuffix("m")
    if flags != "-":
        options.append(flags)
    return [*options, *arguments]
