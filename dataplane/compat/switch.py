"""The switch: code that is not edited gets this project's modules where it imports those of other packages.

It is on in a process whose environment has TQ_REPLACE. `rl_dataplane_switch.pth`, which lies beside the installed
packages, has Python call `install` at its start if the variable is set, and imports nothing if it is not. A Ray job
carries the variable to its workers. This module is imported before all others, so it needs the standard library only.
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
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

log = logging.getLogger(__name__)

VARIABLE = "TQ_REPLACE"
HOOK = "rl_dataplane_switch.pth"
"""The file beside the installed packages that calls `install`."""
ALL = "all"
MODULES: Mapping[str, str] = {
    "transfer_queue": "dataplane.compat.transfer_queue",
    "nemo_rl.data_plane.adapters.transfer_queue": "dataplane.compat.nemo_rl.adapter",
    "rlinf.scheduler": "workers.rlinf",
}
"""Modules of other packages, and those of this project that can be imported in their place, submodules included."""

_RAY_JOB = "ray.job_config"


def names_in(value: str) -> tuple[str, ...]:
    """The modules that a value of the variable means. ValueError for an unknown one."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    if ALL in names:
        return tuple(MODULES)
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise ValueError(f"{VARIABLE}={value!r}: expected {ALL!r}, or names out of {', '.join(MODULES)}")
    return tuple(names)


def install() -> None:
    """Replace the modules that the variable names, in this process from now on. Where its value is wrong, importing any
    module of the table raises ValueError. Once per process."""
    value = os.environ.get(VARIABLE, "")
    if not any(isinstance(finder, Replacement) for finder in sys.meta_path):
        sys.meta_path.insert(0, Replacement(value))


def replaced(*names: str) -> bool:
    """Whether one of `names`, modules of the table, is this project's in this process."""
    on = [finder for finder in sys.meta_path if isinstance(finder, Replacement) and not finder.wrong]
    return any(name in finder.table for finder in on for name in names)


class Replacement:
    """Finds the modules that a value of the variable names, as this project's: the same module objects under two names.

    A finder of `sys.meta_path`, and the loader of what it finds. (`importlib.abc` has base classes for both, and takes
    longer to import than the rest of this module.) table: those modules, out of `MODULES`. wrong: what is wrong with
    the value, or "".
    """

    def __init__(self, value: str) -> None:
        self.value, self.wrong = value, ""
        try:
            names = names_in(value)
        except ValueError as error:
            names, self.wrong = tuple(MODULES), str(error)
        self.table = {name: MODULES[name] for name in names}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`. ModuleNotFoundError where a part is imported that a replaced module may
        have and this project's lacks; None where `importlib.util.find_spec` looks for one."""
        if fullname == _RAY_JOB:
            return self._with_carrying(PathFinder.find_spec(fullname, path))
        for name, ours in self.table.items():
            if fullname == name or fullname.startswith(f"{name}."):
                rest = fullname.removeprefix(name)
                found = self._same(fullname, ours + rest)
            elif fullname.startswith(f"{ours}."):
                rest = fullname.removeprefix(ours)
                found = PathFinder.find_spec(fullname, path)
            else:
                continue
            if found is None and sys._getframe(2).f_code is not importlib.util.find_spec.__code__:
                raise ModuleNotFoundError(
                    f"No module named '{name}{rest}': {VARIABLE}={self.value} makes {name!r} {ours!r}, which has no "
                    f"{rest[1:]!r}; without {VARIABLE} it is the installed package's",
                    name=name + rest,
                )
            return found
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to make a module, whose place `exec_module` gives to this project's."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts this project's module in the place of the new one."""
        spec = module.__spec__
        assert spec is not None
        ours = importlib.import_module(spec.loader_state)
        sys.modules[spec.name] = ours
        if spec.name in self.table:
            log.warning("import %s is %s in this process: %s=%s", spec.name, ours.__name__, VARIABLE, self.value)

    def _same(self, fullname: str, ours: str) -> ModuleSpec | None:
        """How to import this project's module under another name."""
        if self.wrong:
            raise ValueError(self.wrong)
        found = importlib.util.find_spec(ours)
        if found is None:
            return None
        spec = ModuleSpec(fullname, cast("Loader", self), origin=found.origin, loader_state=ours)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def _with_carrying(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Has Ray's `JobConfig` carry the variable from its first import on."""
        loader = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                carry(module.JobConfig, self.value)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def carry(job_config: Any, value: str) -> None:
    """Has every runtime environment that a `ray.job_config.JobConfig` gets set the variable in the job's workers.

    All jobs of a process pass there: by `ray.init` with whatever arguments, called or implied, by Ray's client, by a
    submitted job. Tasks and actors inherit it, those with a runtime environment of their own as well.
    """
    set_runtime_env = job_config.set_runtime_env

    @functools.wraps(set_runtime_env)
    def set_and_carry(self: Any, runtime_env: Any = None, *args: Any, **options: Any) -> None:
        set_runtime_env(self, with_variable(runtime_env, value), *args, **options)

    job_config.set_runtime_env = set_and_carry


def with_variable(runtime_env: Any, value: str) -> Any:
    """A copy of a Ray runtime environment (None: an empty one) that sets the variable, unless it does already."""
    merged: Any = {} if runtime_env is None else copy.copy(runtime_env)
    variables = merged.get("env_vars") or {}
    if isinstance(variables, Mapping):  # Ray says what is wrong with anything else
        merged["env_vars"] = {VARIABLE: value, **variables}
    return merged
