"""The switch: unedited code that imports modules of other packages gets this project's modules instead.

The environment variable TQ_REPLACE turns the switch on. `rl_dataplane_switch.pth`, installed in site-packages, makes
Python call `install` at startup if the variable is set, and imports nothing otherwise. A Ray job passes the variable to
its workers. This module is imported before all others, so it imports only the standard library.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

log = logging.getLogger(__name__)

VARIABLE = "TQ_REPLACE"
HOOK = "rl_dataplane_switch.pth"
"""The file in site-packages that calls `install`."""
ALL = "all"
MODULES: Mapping[str, str] = {
    "transfer_queue": "dataplane.compat.transfer_queue",
    "nemo_rl.data_plane.adapters.transfer_queue": "dataplane.compat.nemo_rl.adapter",
    "rlinf.scheduler": "workers.rlinf",
}
"""Modules of other packages, each with the module of this project that can replace it. Submodules are included."""

_RAY_JOB = "ray.job_config"


def names_in(value: str) -> tuple[str, ...]:
    """Return the modules that a value of TQ_REPLACE names. ValueError for an unknown module."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    if ALL in names:
        return tuple(MODULES)
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise ValueError(f"{VARIABLE}={value!r}: expected {ALL!r}, or names from {', '.join(MODULES)}")
    return tuple(names)


def install() -> None:
    """Replace the modules that TQ_REPLACE names, for later imports in this process. If its value is invalid, importing
    any module of `MODULES` raises ValueError. Further calls have no effect."""
    value = os.environ.get(VARIABLE, "")
    # First in the list, so that it precedes the finder of installed packages.
    if not any(isinstance(finder, Replacement) for finder in sys.meta_path):
        sys.meta_path.insert(0, Replacement(value))


def replaced(*names: str) -> bool:
    """Whether this process replaces one of `names`, keys of `MODULES`."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, Replacement) and not finder.error]
    return any(name in finder.table for finder in finders for name in names)


class Replacement:
    """Import this project's modules under the names in the variable: one module object under two names.

    The class is a finder for `sys.meta_path` and the loader of the modules that it finds. (It does not use the base
    classes of `importlib.abc`, which takes longer to import than the rest of this module.) value: that of TQ_REPLACE.
    table: the entries of `MODULES` that are replaced. error: the error in the value, or "".
    """

    def __init__(self, value: str) -> None:
        self.value = value
        self.error = ""
        try:
            names = names_in(value)
        except ValueError as error:
            # Raised when a module of the table is imported: at startup, Python would only print it.
            names = tuple(MODULES)
            self.error = str(error)
        self.table = {name: MODULES[name] for name in names}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`. For a submodule of a replaced module that this project does not have:
        ModuleNotFoundError, or None if `importlib.util.find_spec` is the caller. None for all other modules except
        `ray.job_config`."""
        if fullname == _RAY_JOB:  # not replaced, but patched: the workers of a Ray job get the variable, too
            return self._patch_job_config(PathFinder.find_spec(fullname, path))
        for name, ours in self.table.items():
            if fullname == name or fullname.startswith(f"{name}."):
                submodule = fullname.removeprefix(name)
                spec = self._spec_for(fullname, ours + submodule)
            elif fullname.startswith(f"{ours}."):
                # `from NAME import SUBMODULE` looks the submodule up under the replacement's own name. Without such a
                # submodule, it gets the error below, too.
                submodule = fullname.removeprefix(ours)
                spec = PathFinder.find_spec(fullname, path)
            else:
                continue
            # Frame 1 is the import system, frame 2 its caller: `importlib.util.find_spec` expects None, not an error.
            if spec is None and sys._getframe(2).f_code is not importlib.util.find_spec.__code__:
                raise ModuleNotFoundError(
                    f"No module named '{name}{submodule}': {VARIABLE}={self.value} replaces {name!r} by {ours!r}, "
                    f"which has no {submodule[1:]!r}; unset {VARIABLE} to import it from the installed package",
                    name=name + submodule,
                )
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put this project's module into `sys.modules` in place of `module`, the empty one."""
        spec = module.__spec__
        assert spec is not None
        ours = importlib.import_module(spec.loader_state)  # the name that `_spec_for` has set
        sys.modules[spec.name] = ours
        if spec.name in self.table:
            log.warning("import %s is replaced by %s: %s=%s", spec.name, ours.__name__, VARIABLE, self.value)

    def _spec_for(self, fullname: str, ours: str) -> ModuleSpec | None:
        """Return the spec that imports this project's module `ours` under the name `fullname`, or None if there is no
        such module. ValueError if the variable is invalid."""
        if self.error:
            raise ValueError(self.error)
        our_spec = importlib.util.find_spec(ours)
        if our_spec is None:
            return None
        spec = ModuleSpec(fullname, cast("Loader", self), origin=our_spec.origin, loader_state=ours)
        spec.submodule_search_locations = our_spec.submodule_search_locations
        return spec

    def _patch_job_config(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Make the loader call `carry_to_jobs` for Ray's `JobConfig` when its module is imported. Return the spec (None
        without Ray)."""
        loader = spec.loader if spec is not None else None
        if loader is not None:
            original_exec_module = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                original_exec_module(module)
                carry_to_jobs(module.JobConfig, self.value)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def carry_to_jobs(job_config: Any, value: str) -> None:
    """Patch `ray.job_config.JobConfig` so that every runtime environment sets the variable in the job's workers.

    Every job of a process uses this class: explicit and implicit `ray.init`, Ray's client, and submitted jobs. Tasks
    and actors inherit the variable, even those with their own runtime environment.
    """
    set_runtime_env = job_config.set_runtime_env

    @functools.wraps(set_runtime_env)
    def set_and_carry(self: Any, runtime_env: Any = None, *args: Any, **options: Any) -> None:
        set_runtime_env(self, with_variable(runtime_env, value), *args, **options)

    job_config.set_runtime_env = set_and_carry


def with_variable(runtime_env: Any, value: str) -> Any:
    """Return a copy of a Ray runtime environment (None: empty) with the variable set. An existing value is kept."""
    merged: Any = {} if runtime_env is None else copy.copy(runtime_env)
    variables = merged.get("env_vars") or {}
    if isinstance(variables, Mapping):  # Ray reports the error for any other type
        merged["env_vars"] = {VARIABLE: value, **variables}
    return merged


# --- `python -m dataplane.compat.transfer_queue ...`: Python with the switch on


def start(name: str) -> NoReturn:
    """Replace this process by the same interpreter with the same options and the arguments after `-m NAME`, and with
    `name` (a module of the switch's table) added to TQ_REPLACE.

    Raises SystemExit if the hook is not installed, because the variable then has no effect, and for an invalid value of
    the variable.
    """
    if not any(os.path.isfile(os.path.join(directory, HOOK)) for directory in sys.path):
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
