"""What the workers of a call answer: waited for together, returned in worker order."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import RayError

from workers.errors import CallWaitTimeoutError
from workers.groups.actors import cause_of

logger = logging.getLogger(__name__)
STEP_S = 1.0
"""Ray holds back what a signal's handler raises for as long as it waits."""
LOG_EVERY_S = 30.0


class CalledGroup(Protocol):
    """What results need to know of the group that was called."""

    worker_to_tied_group_index: dict[int, int]

    @property
    def worker_metadata(self) -> list[dict[str, Any]]: ...


@dataclass
class MultiWorkerFuture:
    """The futures of one call on many workers.

    futures: one per worker called, in worker order; `ObjectRefGenerator`s where the method is a generator.
    return_from_workers: the workers whose results `get_results` returns, None for one of each tied group.
    called_workers: the worker behind each future, None where future n is worker n's.
    """

    futures: list[ObjectRef]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def get_results(
        self,
        worker_group: CalledGroup,
        return_generators_as_proxies: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The results, in worker order: of `return_from_workers`, or else of the first worker of each tied group.

        Blocks, for as long as the workers take or up to `timeout_s` (`CallWaitTimeoutError`, which names who is late),
        until every worker called has answered (also those whose results are dropped), or one raises: then that very
        exception, at once, with a note naming the worker; the others go on. The items of a generator come in its place,
        one after another, and can be taken once. With `return_generators_as_proxies` the `ObjectRefGenerator` itself
        does, and is not waited for. ValueError where `called_workers` are not as many as the futures, or one of them is
        in no tied group of `worker_group`.
        """
        called = self.called_workers if self.called_workers is not None else list(range(len(self.futures)))
        if len(called) != len(self.futures):
            raise ValueError(f"{len(self.futures)} futures of {len(called)} called workers: there is one for each")
        returned = self._returned(called, worker_group.worker_to_tied_group_index)
        streams = {place for place, future in enumerate(self.futures) if isinstance(future, ObjectRefGenerator)}
        proxies = streams if return_generators_as_proxies else set()
        values = collect(
            {place: future for place, future in enumerate(self.futures) if place not in proxies},
            set(returned),
            lambda place: _name(worker_group, called[place]),
            timeout_s=timeout_s,
        )
        results: list[Any] = []
        for place in returned:
            if place in proxies:
                results.append(self.futures[place])
            elif place in streams:
                results.extend(values[place])
            else:
                results.append(values[place])
        return results

    def _returned(self, called: Sequence[int], tied_group_of: Mapping[int, int]) -> list[int]:
        """Places in `futures` whose results are returned, in worker order."""
        in_order = sorted(range(len(called)), key=lambda place: called[place])
        if self.return_from_workers is not None:
            wanted = set(self.return_from_workers)
            return [place for place in in_order if called[place] in wanted]
        first: dict[int, int] = {}
        for place in in_order:
            if called[place] not in tied_group_of:
                raise ValueError(f"worker {called[place]} is in no tied group: has its worker group been shut down?")
            first.setdefault(tied_group_of[called[place]], place)
        return list(first.values())


def collect(
    futures: Mapping[int, ObjectRef | ObjectRefGenerator],
    wanted: Set[int],
    name_of: Callable[[int], str],
    *,
    timeout_s: float | None = None,
) -> dict[int, Any]:
    """What the `wanted` ones of `futures` give: a value each, of a generator the list of its items.

    All are waited for at the same time, generators too, so that the first to fail raises its exception at once,
    wanted or not, with a note that says which it is (`name_of` its key). The others go on, and what they raise is
    dropped. What a signal's handler raises is raised within `STEP_S`; a log line says every `LOG_EVERY_S` who is waited
    for; after `timeout_s`, `CallWaitTimeoutError`.
    """
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    key_of = {future: key for key, future in futures.items()}
    values: dict[int, Any] = {}
    last: dict[int, ObjectRef] = {}
    waiting, idle_s = list(futures.values()), 0.0
    while waiting:
        step_s = max(min(STEP_S, end - time.monotonic()), 0.0)
        done, waiting = ray.wait(waiting, num_returns=1, timeout=step_s)
        if not done:
            if timeout_s is not None and time.monotonic() >= end:
                late = ", ".join(name_of(key_of[future]) for future in waiting)
                raise CallWaitTimeoutError(what=f"a call on {late}", waited_s=timeout_s)
            idle_s += STEP_S
            if idle_s % LOG_EVERY_S == 0:
                late = ", ".join(name_of(key_of[future]) for future in waiting)
                logger.info("waiting for %s: no worker answered in the last %.0f s", late, idle_s)
            continue
        future, idle_s = done[0], 0.0
        key = key_of[future]
        try:
            if not isinstance(future, ObjectRefGenerator):
                value = ray.get(future)
                if key in wanted:
                    values[key] = value
            elif _take(future, key, values.setdefault(key, []) if key in wanted else None, last):
                waiting.append(future)
        except Exception as error:
            drop_errors(waiting)
            own = cause_of(error)
            (own or error).add_note(f"raised by worker {name_of(key)}")
            if own is None:
                raise
            raise own from error
    return values


def drop_errors(futures: Sequence[ObjectRef | ObjectRefGenerator]) -> None:
    """Have Ray not log as unhandled what `futures` raise that nobody waits for any longer."""
    for future in futures:
        if isinstance(future, ObjectRef):
            future._on_completed(_ignore)
        else:
            future.completed()._on_completed(functools.partial(_drop_items, future))


def _ignore(_: object) -> None:
    """What came of it."""


def _drop_items(stream: ObjectRefGenerator, _: object) -> None:
    """Of a generator that has ended: the last of its items is what it raised. Reading waits for threads of Ray's, of
    which this is one."""

    def read() -> None:
        with contextlib.suppress(RayError):
            for item in stream:
                item._on_completed(_ignore)

    threading.Thread(target=read, name="tq-dropped-items", daemon=True).start()


def _take(stream: ObjectRefGenerator, key: int, items: list[Any] | None, last: dict[int, ObjectRef]) -> bool:
    """Take the next item of `stream`, which is there; False at its end.

    items: where to, None where they are not wanted. Then none is fetched but the last, which holds the exception of a
    generator that raised; until the end shows which one that is, it is in `last`.
    """
    item = next(stream, None)
    if item is None:
        if key in last:
            ray.get(last.pop(key))
        return False
    if items is None:
        last[key] = item
    else:
        items.append(ray.get(item))
    return True


def _name(group: CalledGroup, worker: int) -> str:
    metadata = group.worker_metadata
    return str(metadata[worker]["name"]) if worker < len(metadata) else str(worker)
