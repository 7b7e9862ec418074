"""The results of a call on the workers of a group, waited for together. `GroupFuture` is the one way to block for them,
for both interfaces of groups and for their start; `MultiWorkerFuture`, of `RayWorkerGroup`, says whose results are
returned."""

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
"""Ray holds back what a signal's handler raises for as long as it waits."""


@dataclass(frozen=True)
class Called:
    """One worker's part of a call. name: the worker's; actor: None where nothing more is asked of it; wanted: whether
    its result is kept."""

    name: str
    reference: ObjectRef | ObjectRefGenerator
    actor: Any = None
    wanted: bool = True


class GroupFuture:
    """The results of a call on some workers. what: precedes the workers' names in messages ("Class.method on ")."""

    _log_level = logging.INFO

    def __init__(self, what: str, calls: Sequence[Called]) -> None:
        self._call = what
        self._calls = calls

    def collect(self, timeout: float | None = None) -> list[Any]:
        """The results in the order of the calls, of a generator the list of its items, None where it is not wanted.

        All are waited for at the same time, generators too, so that the first to fail raises its exception at once,
        wanted or not, with a note of the worker. The others go on, and what they raise is dropped. What a signal's
        handler raises is raised within `STEP_S`. Every `waiting.LOG_EVERY_S` a log line says which workers are late;
        after `timeout` seconds, once none is ready, `CallWaitTimeoutError`, which names those that are late.
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
        """What to raise for calls that are not done within `timeout_s`."""
        return CallWaitTimeoutError(what=what, waited_s=timeout_s)

    def _raised(self, call: Called, error: BaseException) -> BaseException:
        """What to raise for what Ray raises for a worker: the exception that was raised there, if there was one."""
        return noted(error, f"raised by worker {call.name}")


def cause_of(error: BaseException) -> BaseException | None:
    """The exception raised in the other process, None where there was none or it cannot be brought here.

    Ray wraps what a method raises in a `RayTaskError`, and what a constructor raises in that and an `ActorDiedError`.
    """
    inner = error.args[0] if error.args and isinstance(error.args[0], RayTaskError) else error
    cause = getattr(inner, "cause", None)
    return cause if isinstance(cause, BaseException) and not isinstance(cause, RayError) else None


def noted(error: BaseException, note: str) -> BaseException:
    """The exception raised in the other process, or `error` where there was none, with a note."""
    own = cause_of(error)
    if own is not None:
        own.__cause__ = error
    found = error if own is None else own
    found.add_note(note)
    return found


def _take(stream: ObjectRefGenerator, items: list[Any], wanted: bool) -> bool:
    """Take the next item of `stream`, which is there, into `items`; False at its end.

    Of items that are not wanted none is fetched but the last, which holds the exception of a generator that raised; the
    end shows which one that is.
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
    """Have Ray not log as unhandled what `references` raise that nobody waits for any longer."""
    for reference in references:
        if isinstance(reference, ObjectRef):
            reference._on_completed(_ignore)
        else:
            reference.completed()._on_completed(functools.partial(_drop_items, reference))


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


def wait_for_all(futures: Sequence[ObjectRef], *, timeout_s: float) -> list[ObjectRef]:
    """Those of `futures` that are done once all are, or `timeout_s` has passed. What a signal's handler raises is
    raised within `STEP_S`."""
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(end - time.monotonic(), 0.0)
        done, _ = ray.wait(list(futures), num_returns=len(futures), timeout=min(left_s, STEP_S))
        if len(done) == len(futures) or left_s <= STEP_S:
            return list(done)


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


def _name(group: CalledGroup, worker: int) -> str:
    metadata = group.worker_metadata
    return str(metadata[worker]["name"]) if worker < len(metadata) else str(worker)
