"""Results of a call on the workers of a group. All interfaces of groups block in `GroupFuture.collect`.
`MultiWorkerFuture` is the result type of `RayWorkerGroup` and selects the workers whose results are returned."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import RayError, RayTaskError

from dataplane.core.durations import seconds_if_any
from workers.errors import CallWaitTimeoutError
from workers.transport.waiting import LoggedWait

STEP_S = 1.0
"""Longest single wait in Ray, which delays exceptions of signal handlers until the wait returns."""


@dataclass(frozen=True)
class Called:
    """The call on one worker. name: the worker's; actor: None if it is not needed later; wanted: whether to keep the
    result."""

    name: str
    reference: ObjectRef | ObjectRefGenerator
    actor: Any = None
    wanted: bool = True


class GroupFuture:
    """The results of a call on some workers. what: text before the workers' names in messages ("Class.method on ")."""

    _log_level = logging.INFO

    def __init__(self, what: str, calls: Sequence[Called]) -> None:
        self._call = what
        self._calls = calls

    def collect(self, timeout: float | None = None) -> list[Any]:
        """Return the results in the order of the calls: for a generator the list of its items, None for an unwanted
        result.

        All calls are awaited at the same time, generators included. The first exception, of an unwanted result too,
        is raised at once with a note that names the worker. The other calls continue, and their exceptions are
        dropped. An exception of a signal handler is raised within `STEP_S`. A log line every `waiting.LOG_EVERY_S`
        names the pending workers. `CallWaitTimeoutError`, which names them too, once `timeout` seconds have passed
        and no further result is ready.
        """
        wait = LoggedWait(seconds_if_any("timeout", timeout), self._log_level)
        results: list[Any] = [None] * len(self._calls)
        items: dict[int, list[Any]] = {}
        place_of = {call.reference: place for place, call in enumerate(self._calls)}
        waiting = list(place_of)
        while waiting:
            first, others = ray.wait(waiting, num_returns=1, timeout=wait.step_s(STEP_S))
            if not first:
                late = self._named(self._calls[place_of[reference]] for reference in waiting)
                if wait.over(late):
                    raise self._late(late, wait.timeout_s)
                continue
            also, waiting = ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
            ready = [*first, *also]
            for number, reference in enumerate(ready, 1):
                place = place_of[reference]
                call = self._calls[place]
                try:
                    if not isinstance(reference, ObjectRefGenerator):
                        value = ray.get(reference)
                    elif _take(reference, items.setdefault(place, []), call.wanted):
                        waiting.append(reference)
                        continue
                    else:
                        value = items[place]
                except Exception as error:
                    _drop_errors([*ready[number:], *waiting])
                    raised = self._raised(call, error)
                    raise raised from raised.__cause__
                if call.wanted:
                    results[place] = value
        return results

    def _named(self, calls: Iterable[Called]) -> str:
        return self._call + ", ".join(call.name for call in calls)

    def _late(self, what: str, timeout_s: float) -> Exception:
        """Return the exception to raise for calls that are not done within `timeout_s`."""
        return CallWaitTimeoutError(what=what, waited_s=timeout_s)

    def _raised(self, call: Called, error: BaseException) -> BaseException:
        """Return the exception to raise for an error that Ray raises: the exception of the worker itself, if there
        is one."""
        return noted(error, f"raised by worker {call.name}")


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception raised in the other process. None if there is none or if it cannot be sent here.

    Ray wraps an exception of a method in a `RayTaskError`, and one of a constructor also in an `ActorDiedError`.
    """
    inner = error.args[0] if error.args and isinstance(error.args[0], RayTaskError) else error
    cause = getattr(inner, "cause", None)
    return cause if isinstance(cause, BaseException) and not isinstance(cause, RayError) else None


def noted(error: BaseException, note: str) -> BaseException:
    """Add a note to the exception raised in the other process, or to `error` if there is none. Return that
    exception."""
    own = cause_of(error)
    if own is not None:
        own.__cause__ = error
    found = error if own is None else own
    found.add_note(note)
    return found


def _take(stream: ObjectRefGenerator, items: list[Any], wanted: bool) -> bool:
    """Move the next item of `stream`, which is ready, to `items`. Return False at the end of the stream.

    If the items are unwanted, only the last one is fetched, because it holds the exception of a generator that
    raised. Which one is the last is known at the end of the stream.
    """
    item = next(stream, None)
    if item is None:
        if not wanted:
            ray.get(items)
        return False
    if wanted:
        items.append(ray.get(item))
    else:
        items[:] = [item]
    return True


def _drop_errors(references: Sequence[ObjectRef | ObjectRefGenerator]) -> None:
    """Keep Ray from logging the exceptions of `references`, which no caller awaits, as unhandled."""
    for reference in references:
        if isinstance(reference, ObjectRef):
            reference._on_completed(_ignore)
        else:
            reference.completed()._on_completed(functools.partial(_drop_items, reference))


def _ignore(_: object) -> None:
    """Drop a result."""


def _drop_items(stream: ObjectRefGenerator, _: object) -> None:
    """Drop the items of a generator that has ended. The last one holds its exception. A new thread reads them,
    because a read blocks until Ray's threads make progress and this callback runs in one of them."""

    def read() -> None:
        with contextlib.suppress(RayError):
            for item in stream:
                item._on_completed(_ignore)

    threading.Thread(target=read, name="tq-dropped-items", daemon=True).start()


def wait_for_all(futures: Sequence[ObjectRef], *, timeout_s: float) -> list[ObjectRef]:
    """Return the futures that are done once all are done or `timeout_s` has passed. An exception of a signal handler
    is raised within `STEP_S`."""
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(end - time.monotonic(), 0.0)
        done, _ = ray.wait(list(futures), num_returns=len(futures), timeout=min(left_s, STEP_S))
        if len(done) == len(futures) or left_s <= STEP_S:
            return list(done)


class CalledGroup(Protocol):
    """The attributes of the called group that `MultiWorkerFuture` reads."""

    worker_to_tied_group_index: dict[int, int]

    @property
    def worker_metadata(self) -> list[dict[str, Any]]: ...


@dataclass
class MultiWorkerFuture:
    """The futures of one call on many workers.

    futures: one per called worker, in worker order; `ObjectRefGenerator`s if the method is a generator.
    return_from_workers: workers whose results `get_results` returns; None for one worker of each tied group.
    called_workers: the worker of each future; None if future n belongs to worker n.
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
        """Return the results of `return_from_workers`, or else of the first worker of each tied group, in worker
        order.

        Blocks until every called worker has returned, including workers whose results are dropped, or until one
        raises. Raises the original exception at once, with a note that names the worker, while the others continue.
        `CallWaitTimeoutError`, which names the pending workers, after `timeout_s` (None: no limit). The items of a
        generator are inserted in place of its result and can be taken once. With `return_generators_as_proxies` the
        `ObjectRefGenerator` is returned instead and not awaited. ValueError if `called_workers` and `futures` differ
        in length, or if a called worker is in no tied group of `worker_group`.
        """
        called = self.called_workers if self.called_workers is not None else list(range(len(self.futures)))
        if len(called) != len(self.futures):
            raise ValueError(
                f"{len(self.futures)} futures for {len(called)} called workers; pass one future per worker"
            )
        returned = self._returned(called, worker_group.worker_to_tied_group_index)
        wanted = set(returned)
        streams = {place for place, future in enumerate(self.futures) if isinstance(future, ObjectRefGenerator)}
        calls = {
            place: Called(_name(worker_group, called[place]), future, wanted=place in wanted)
            for place, future in enumerate(self.futures)
            if not (return_generators_as_proxies and place in streams)
        }
        answers = GroupFuture("a call on ", list(calls.values())).collect(seconds_if_any("timeout_s", timeout_s))
        values = dict(zip(calls, answers, strict=True))
        results: list[Any] = []
        for place in returned:
            if place not in values:
                results.append(self.futures[place])
            elif place in streams:
                results.extend(values[place])
            else:
                results.append(values[place])
        return results

    def _returned(self, called: Sequence[int], tied_group_of: Mapping[int, int]) -> list[int]:
        """Return the indices in `futures` of the results to return, in worker order."""
        in_order = sorted(range(len(called)), key=lambda place: called[place])
        if self.return_from_workers is not None:
            wanted = set(self.return_from_workers)
            return [place for place in in_order if called[place] in wanted]
        first: dict[int, int] = {}
        for place in in_order:
            if called[place] not in tied_group_of:
                raise ValueError(
                    f"worker {called[place]} is in no tied group; its worker group may have been shut down"
                )
            first.setdefault(tied_group_of[called[place]], place)
        return list(first.values())


def _name(group: CalledGroup, worker: int) -> str:
    metadata = group.worker_metadata
    return str(metadata[worker]["name"]) if worker < len(metadata) else str(worker)
