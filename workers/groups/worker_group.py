"""A group of workers of one class, called together as if they were one object of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle

from workers.errors import GroupEndedError, NoSuchRankError
from workers.groups.calls import GroupCall
from workers.groups.cluster import Cluster
from workers.groups.futures import Called
from workers.groups.launch import Launch, find_actors, launch_group
from workers.groups.remote_errors import methods_of
from workers.groups.started_group import StartedGroup
from workers.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy

CATCH_VARIABLE = "RLINF_CATCH_FAILURE"
STORED_BYTES = 64 << 10
"""An argument of more than that, for several workers, is stored once and not sent to each."""

C = TypeVar("C")


class WorkerGroup(Generic[C]):
    """Workers of `worker_cls`, one for each place that a strategy names; `worker_cls.create_group(...)` makes one.

    Every public method of the class, static ones and those inherited from `Worker` too, is a method of the group: it is
    called on all ranks, or those of `execute_on`, with the same arguments, and returns a `GroupCall` at once. (The
    names of this class's own methods are taken: ValueError for a class that has one of them.) What a generator yields
    is its worker's result as a list, once it has ended; an asynchronous generator's call is a TypeError.

    Groups are equal if they stand for the same workers. They can be sent to other workers of the job. A launched group
    ends with `end_group`, as a context manager, with its cluster, or when nothing refers to it or a call of it.
    """

    @dataclass(frozen=True)
    class WorkerRank:
        """A worker's Ray actor, and its rank."""

        worker: ActorHandle
        rank: int

    def __init__(self, worker_cls: type[C], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self._worker_cls = worker_cls
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._methods = methods_of(worker_cls)
        taken = sorted(self._methods & methods_of(WorkerGroup))
        if taken:
            raise ValueError(f"{worker_cls.__name__} has methods of names that groups have themselves: {taken}")
        self._name = f"worker_group_{worker_cls.__name__}"
        self._crew: StartedGroup | None = None
        self._token: object = None
        self._workers: list[WorkerGroup.WorkerRank] = []
        self._launched = False
        self._next = threading.local()

    @property
    def worker_cls_name(self) -> str:
        return self._worker_cls.__name__

    @property
    def worker_group_name(self) -> str:
        return self._name

    @property
    def worker_info_list(self) -> list[WorkerRank]:
        """Each worker's actor and rank, in rank order; empty before the launch and after the end."""
        return list(self._workers)

    @classmethod
    def from_group_name(cls, worker_cls: type[C], group_name: str) -> WorkerGroup[C]:
        """The launched group of that name, to be called from this process, which is the driver or a worker of its job.

        RuntimeError in a process that is in no Ray cluster, `NameNotFoundError` if there is no such group,
        `WorkerLostError` if it has ended or one of its workers is gone.
        """
        if not ray.is_initialized():
            raise RuntimeError("this process is in no Ray cluster, and so in no job whose groups it could find")
        cluster = Cluster()
        entry = cluster.directory.lookup_group(group_name)
        group: WorkerGroup[C] = cls(worker_cls)
        group._name = group_name
        group._take(find_actors(entry), entry.facts["token"])
        return group

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        catch_system_failure: bool | None = None,
        disable_distributed_log: bool = False,
    ) -> WorkerGroup[C]:
        """Construct the workers; returns this group once all are, or raises what a constructor raised, leaving nothing.

        placement_strategy: by default a worker for each accelerator of the cluster, or one CPU worker. name: by default
        "worker_group_" and the class's name; `NameInUseError` while a group that has not ended has it. max_concurrency:
        of Ray, how many calls a worker serves at a time. isolate_gpu: workers see no accelerators but their own.
        catch_system_failure (RLINF_CATCH_FAILURE if None, which is on unless "0"): an exit in a method is that call's
        error; a signal that ends a worker leaves in its log what it was doing; and the log of this process tells of
        workers whose process died. disable_distributed_log: what workers log is not sent to the driver, but written to
        files beside Ray's logs.
        """
        if self._launched:
            raise RuntimeError(f"worker group {self._name!r} was launched before; make another with create_group")
        if placement_strategy is None:
            count = cluster.num_accelerators
            placement_strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy([0])
        wanted = Launch(
            cls=self._worker_cls,
            args=self._args,
            kwargs=self._kwargs,
            name=self._name if name is None else name,
            placements=placement_strategy.get_placement(cluster, isolate_gpu),
            max_concurrency=max_concurrency,
            catch_failures=_catches() if catch_system_failure is None else catch_system_failure,
            log_to_driver=not disable_distributed_log,
        )
        self._crew, entry = launch_group(cluster, wanted)
        self._name = wanted.name
        self._take(self._crew.actors, entry.facts["token"])
        cluster.adopt(self)
        return self

    def end_group(self) -> bool:
        """Kill the workers; whoever waits for one of them is told, and the name is free. Whether all went well. A no-op
        once done, and for a group that was not launched through this object."""
        crew, self._crew = self._crew, None
        if crew is None:
            return True
        self._workers = []
        return crew.end()

    def execute_on(self, *ranks: int) -> WorkerGroup[C]:
        """Have the next call of this thread on this group go to those ranks only, in this order; all if none are named.

        `NoSuchRankError` for a rank that the group has not; then the next call goes to all.
        """
        self._next.ranks = None
        size = len(self._called_workers())
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
                raise NoSuchRankError(group=self._name, rank=rank, size=size)
        self._next.ranks = ranks or None
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_methods" not in self.__dict__:
            raise AttributeError(name)
        ranks = self._take_ranks()
        if name not in self._methods:
            hidden = "; methods that begin with '_' are not called on groups" if name.startswith("_") else ""
            raise AttributeError(f"{self.worker_cls_name} has no method {name!r} to call on its group{hidden}")
        return _Method(self, name, ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerGroup):
            return NotImplemented
        if self._token is None:
            return self is other
        return (self._name, self._token) == (other._name, other._token)

    def __hash__(self) -> int:
        return hash(self._worker_cls.__qualname__)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.worker_cls_name}, {self._name!r}, {len(self._workers)} workers)"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._launched:
            return WorkerGroup, (self._worker_cls, self._args, self._kwargs)
        return WorkerGroup.from_group_name, (self._worker_cls, self._name)

    def __enter__(self) -> WorkerGroup[C]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_group()

    def _take(self, actors: Sequence[ActorHandle], token: object) -> None:
        self._workers = [WorkerGroup.WorkerRank(actor, rank) for rank, actor in enumerate(actors)]
        self._token = token
        self._launched = True

    def _called_workers(self) -> list[WorkerRank]:
        """RuntimeError before the launch, `GroupEndedError` after the end. (Ray would start anew for a call then.)"""
        if not self._launched:
            raise RuntimeError(f"worker group {self._name!r} has not been launched")
        if not self._workers or not ray.is_initialized():
            raise GroupEndedError(group=self._name)
        return self._workers

    def _take_ranks(self) -> tuple[int, ...] | None:
        ranks: tuple[int, ...] | None = getattr(self._next, "ranks", None)
        self._next.ranks = None
        return ranks

    def _call(self, method: str, ranks: Sequence[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        workers = self._called_workers()
        called = workers if ranks is None else [workers[rank] for rank in ranks]
        if len(called) > 1:
            args = tuple(_stored(value) for value in args)
            kwargs = {name: _stored(value) for name, value in kwargs.items()}
        calls = [
            Called(f"{self._name}:{one.rank}", getattr(one.worker, method).remote(*args, **kwargs), one.worker)
            for one in called
        ]
        return GroupCall(f"{self.worker_cls_name}.{method}", calls, self)


class _Method:
    """A method of a group. ranks: of its first call; later ones are on those of `execute_on`, else on all."""

    def __init__(self, group: WorkerGroup[Any], name: str, ranks: tuple[int, ...] | None) -> None:
        self._group = group
        self._name = name
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> GroupCall:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            ranks = self._group._take_ranks()
        call: GroupCall = self._group._call(self._name, ranks, args, kwargs)
        return call

    def __repr__(self) -> str:
        return f"<{self._group.worker_cls_name}.{self._name} on {self._group!r}>"


def _stored(value: Any) -> Any:
    size = len(value) if isinstance(value, bytes | bytearray) else getattr(value, "nbytes", 0)
    return ray.put(value) if isinstance(size, int) and size > STORED_BYTES else value


def _catches() -> bool:
    value = os.environ.get(CATCH_VARIABLE, "1").strip().lower()
    if value not in ("1", "0", "true", "false"):
        raise ValueError(f"{CATCH_VARIABLE}={value!r}: 1 or 0")
    return value in ("1", "true")
