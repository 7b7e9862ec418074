"""`WorkerGroup`: workers of one class that are called together like one object of that class."""

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
from workers.groups.launch import Launch, find_actors, launch_worker_group
from workers.groups.remote_errors import methods_of
from workers.groups.started_group import Called, StartedGroup
from workers.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy

CATCH_VARIABLE = "RLINF_CATCH_FAILURE"
STORED_BYTES = 64 << 10
"""An argument larger than this, for several workers, is put in the object store once instead of sent to each."""

C = TypeVar("C")


class WorkerGroup(Generic[C]):
    """Workers of `worker_cls`, one per place of a placement strategy. Create a group with
    `worker_cls.create_group(...)`.

    Every public method of the class, static and inherited ones included, is a method of the group. It calls all
    ranks, or those of `execute_on`, with the same arguments, and returns a `GroupCall` at once. A class with a
    method that has the name of one of this class's own methods is a ValueError. The result of a generator is the
    list of its items, available after the generator has ended. A call of an asynchronous generator is a TypeError.

    Two groups are equal if they refer to the same workers. Groups can be sent to other workers of the job. A
    launched group ends by `end_group`, at the end of its `with` block, with its cluster, or when the last reference
    to the group and to its calls is dropped.
    """

    @dataclass(frozen=True)
    class WorkerRank:
        """The Ray actor of a worker, and its rank."""

        worker: ActorHandle
        rank: int

    def __init__(self, worker_cls: type[C], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self._worker_cls = worker_cls
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._methods = methods_of(worker_cls)
        taken = sorted(self._methods & methods_of(WorkerGroup))
        if taken:
            raise ValueError(
                f"{worker_cls.__name__} has methods with names reserved by WorkerGroup: {taken}; rename them"
            )
        self._name = f"worker_group_{worker_cls.__name__}"
        self._started: StartedGroup | None = None  # set only in the process that launched the group, until the end
        self._token: object = None  # distinguishes this launch from other launches under the same name
        self._workers: list[WorkerGroup.WorkerRank] = []
        self._launched = False  # stays True after `end_group`, which empties `_workers`
        self._next = threading.local()  # attribute `ranks`: those of this thread's next call, None for all

    @property
    def worker_cls_name(self) -> str:
        return self._worker_cls.__name__

    @property
    def worker_group_name(self) -> str:
        return self._name

    @property
    def worker_info_list(self) -> list[WorkerRank]:
        """Actor and rank of each worker, in rank order. Empty before the launch and after the end."""
        return list(self._workers)

    @classmethod
    def from_group_name(cls, worker_cls: type[C], group_name: str) -> WorkerGroup[C]:
        """Return the launched group of that name. Call this in the driver or in a worker of its job.

        RuntimeError if this process is not connected to a Ray cluster, `NameNotFoundError` if no group has that
        name, `WorkerLostError` if the group has ended or one of its workers has died.
        """
        if not ray.is_initialized():
            raise RuntimeError(
                "cannot look up a group: this process is not connected to a Ray cluster; call ray.init first"
            )
        cluster = Cluster()
        entry = cluster.directory.lookup_worker_group(group_name)
        worker_group: WorkerGroup[C] = cls(worker_cls)
        worker_group._name = group_name
        worker_group._set_workers(find_actors(entry), entry.facts["token"])
        return worker_group

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
        """Construct the workers and return this group once all are constructed. If a constructor raises, raise its
        exception and leave no worker behind.

        placement_strategy: default: one worker per accelerator of the cluster, or one CPU worker. name: default
        "worker_group_" and the class name; `NameInUseError` if a running group has the name. max_concurrency: Ray's
        limit of concurrent calls per worker. isolate_gpu: each worker sees only its own accelerators.
        catch_system_failure (default: RLINF_CATCH_FAILURE, which is on unless "0"): `sys.exit` in a method becomes
        an error of that call; a worker that is ended by a signal writes its stack to its log; this process logs the
        death of workers. disable_distributed_log: workers write their log to files beside Ray's logs and not to the
        driver.
        """
        if self._launched:
            raise RuntimeError(f"worker group {self._name!r} was launched before; create another one with create_group")
        if placement_strategy is None:
            count = cluster.num_accelerators
            placement_strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy([0])
        parameters = Launch(
            cls=self._worker_cls,
            args=self._args,
            kwargs=self._kwargs,
            name=self._name if name is None else name,
            placements=placement_strategy.get_placement(cluster, isolate_gpu),
            max_concurrency=max_concurrency,
            catch_failures=_catch_by_default() if catch_system_failure is None else catch_system_failure,
            log_to_driver=not disable_distributed_log,
        )
        self._started, entry = launch_worker_group(cluster, parameters)
        self._name = parameters.name
        self._set_workers(self._started.actors, entry.facts["token"])
        cluster.adopt(self)
        return self

    def end_group(self) -> bool:
        """Kill the workers. Callers that wait for one of them get an error, and the name becomes available. Return
        whether all workers were killed. A no-op after the first call, and for a group that was not launched through
        this object."""
        started, self._started = self._started, None
        if started is None:  # ended before, or not launched through this object
            return True
        self._workers = []
        return started.end()

    def execute_on(self, *ranks: int) -> WorkerGroup[C]:
        """Restrict the next call of this thread on this group to these ranks, in this order; to all if no rank is
        given.

        `NoSuchRankError` for a rank outside of the group; the next call then goes to all ranks.
        """
        self._next.ranks = None  # also after an error below
        size = len(self._require_workers())
        for rank in ranks:
            is_integer = isinstance(rank, int) and not isinstance(rank, bool)
            if not is_integer or not 0 <= rank < size:
                raise NoSuchRankError(group=self._name, rank=rank, size=size)
        self._next.ranks = ranks or None
        return self

    def __getattr__(self, name: str) -> Any:
        """Return the method `name` of the worker class as a method of the group, for the ranks of `execute_on`."""
        # copy and pickle look up special methods, also before `__init__` has set `_methods`.
        if name.startswith("__") or "_methods" not in self.__dict__:
            raise AttributeError(name)
        # Before the check: `execute_on` applies to one call only, even if that call fails here.
        ranks = self._take_ranks()
        if name not in self._methods:
            raise AttributeError(
                f"{self.worker_cls_name} has no public method {name!r}; a group can call only public methods of the "
                "class of its workers"
            )
        return _Method(self, name, ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerGroup):
            return NotImplemented
        if self._token is None:  # not launched
            return self is other
        return (self._name, self._token) == (other._name, other._token)

    def __hash__(self) -> int:
        return hash(self._worker_cls.__qualname__)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.worker_cls_name}, {self._name!r}, {len(self._workers)} workers)"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._launched:
            return WorkerGroup, (self._worker_cls, self._args, self._kwargs)
        # The receiver finds the workers in the directory. Its copy does not end the group.
        return WorkerGroup.from_group_name, (self._worker_cls, self._name)

    def __enter__(self) -> WorkerGroup[C]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_group()

    def _set_workers(self, actors: Sequence[ActorHandle], token: object) -> None:
        """Make this the launched group of these actors, which are ordered by rank."""
        self._workers = [WorkerGroup.WorkerRank(actor, rank) for rank, actor in enumerate(actors)]
        self._token = token
        self._launched = True

    def _require_workers(self) -> list[WorkerRank]:
        """Return all workers. RuntimeError before the launch, `GroupEndedError` after the end. Without this check, Ray
        itself would start a new cluster for the call."""
        if not self._launched:
            raise RuntimeError(f"worker group {self._name!r} has not been launched; call launch() first")
        if not self._workers or not ray.is_initialized():
            raise GroupEndedError(group=self._name)
        return self._workers

    def _take_ranks(self) -> tuple[int, ...] | None:
        """Return the ranks of this thread's last `execute_on` and reset them; None for all ranks."""
        ranks: tuple[int, ...] | None = getattr(self._next, "ranks", None)
        self._next.ranks = None
        return ranks

    def _call(self, method: str, ranks: Sequence[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `method` on the workers of these ranks (None: all) and return the `GroupCall`."""
        workers = self._require_workers()
        called = workers if ranks is None else [workers[rank] for rank in ranks]
        if len(called) > 1:  # to a single worker, Ray sends the values with the call
            args = tuple(_store_if_large(value) for value in args)
            kwargs = {name: _store_if_large(value) for name, value in kwargs.items()}
        calls = [
            Called(
                f"{self._name}:{entry.rank}",
                getattr(entry.worker, method).remote(*args, **kwargs),
                actor=entry.worker,
            )
            for entry in called
        ]
        return GroupCall(f"{self.worker_cls_name}.{method}", calls, self)


class _Method:
    """A method of a group, as `WorkerGroup.__getattr__` returns it. ranks: of its first call; later calls go to the
    ranks of `execute_on`, or to all."""

    def __init__(self, worker_group: WorkerGroup[Any], name: str, ranks: tuple[int, ...] | None) -> None:
        self._worker_group = worker_group
        self._name = name
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> GroupCall:
        ranks, self._ranks = self._ranks, None  # they apply to one call
        if ranks is None:
            ranks = self._worker_group._take_ranks()
        call: GroupCall = self._worker_group._call(self._name, ranks, args, kwargs)
        return call

    def __repr__(self) -> str:
        return f"<{self._worker_group.worker_cls_name}.{self._name} on {self._worker_group!r}>"


def _store_if_large(value: Any) -> Any:
    """Put an argument of more than `STORED_BYTES` in the object store and return its reference. Return others as they
    are: smaller ones, and those whose size is unknown."""
    size = len(value) if isinstance(value, bytes | bytearray) else getattr(value, "nbytes", 0)
    return ray.put(value) if isinstance(size, int) and size > STORED_BYTES else value


def _catch_by_default() -> bool:
    """Return the default of `catch_system_failure`, from the environment. ValueError unless it is 1, 0, true or
    false."""
    value = os.environ.get(CATCH_VARIABLE, "1").strip().lower()
    if value not in ("1", "0", "true", "false"):
        raise ValueError(f"{CATCH_VARIABLE}={value!r}: set it to 1 or 0")
    return value in ("1", "true")
