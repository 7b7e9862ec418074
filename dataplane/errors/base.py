"""Base class of the package's errors, whose facts are attributes from which an error can be rebuilt, and
the errors for partitions, tasks, fields and samples that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

SHOWN = 5
"""Maximum number of names in an error message, and mostly also in the facts of an error."""


def first_few(names: Sequence[object], total: int | None = None) -> str:
    """Format `names` for a message: at most five names, then the number of further ones. `total` is the full count if
    `names` is already cut."""
    count = len(names) if total is None else total
    shown = names[:SHOWN]
    text = ", ".join(repr(name) for name in shown)
    return text if count <= len(shown) else f"{text} and {count - len(shown)} more"


def named(samples: Sequence[str], total: int | None) -> dict[str, Any]:
    """Return the facts of an error that names samples. total: their number, if `samples` has only
    the first few."""
    return {"samples": list(samples[:SHOWN]), "total": len(samples) if total is None else total}


def rebuild(cls: Callable[..., DataPlaneError], facts: dict[str, Any]) -> DataPlaneError:
    """Create an error from its facts; for pickle and `from_wire`."""
    return cls(**facts)


class DataPlaneError(Exception):
    """Base class of all errors of the package. `facts` are the keyword arguments of the constructor; each is an
    attribute too. `grpc_status` is the name of the error's gRPC status."""

    grpc_status: ClassVar[str]

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})  # missing while the error is constructed or copied
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        # The message itself; KeyError would show its repr.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.facts)


class NotFoundError(DataPlaneError, KeyError):
    """A partition, task, field or sample of the request does not exist."""

    grpc_status = "NOT_FOUND"


class PartitionNotFoundError(NotFoundError):
    """The partition is not registered. `known`: the first few of the `total` that are (None: all)."""

    def __init__(self, *, partition: str, known: Sequence[str] = (), total: int | None = None) -> None:
        shown, facts = _names(known, total)
        registered = f"registered are {shown}" if known else "no partition is registered"
        super().__init__(
            f"unknown partition {partition!r}; {registered}. Call register_partition first.",
            partition=partition,
            **facts,
        )


class TaskNotFoundError(NotFoundError):
    """The partition has no such consumer task. `known`: the first few of its `total` tasks (None: all)."""

    def __init__(self, *, partition: str, task: str, known: Sequence[str] = (), total: int | None = None) -> None:
        shown, facts = _names(known, total)
        super().__init__(
            f"unknown task {task!r} in partition {partition!r}; its consumer_tasks are "
            f"{shown or 'none'}. Name one of them, or register the partition with this task.",
            partition=partition,
            task=task,
            **facts,
        )


class FieldNotFoundError(NotFoundError):
    """The field is neither declared nor produced. `known`: the first few of the partition's `total` fields (None:
    all)."""

    def __init__(self, *, partition: str, field: str, known: Sequence[str] = (), total: int | None = None) -> None:
        shown, facts = _names(known, total)
        super().__init__(
            f"unknown field {field!r} in partition {partition!r}; its fields are "
            f"{shown or 'none'}. Put the field first, or declare it in register_partition.",
            partition=partition,
            field=field,
            **facts,
        )


def _names(known: Sequence[str], total: int | None) -> tuple[str, dict[str, Any]]:
    """Return the text and the facts about the `total` names that exist (None: `known` has all of them)."""
    count = len(known) if total is None else total
    names = sorted(known)[:SHOWN]
    return first_few(names, count), {"known": names, "total": count}


class _SamplesError(NotFoundError):
    """Base class of errors that name samples. `samples` holds the first few (or all of them, if the call was executed
    for the other samples). `total` counts all of them. `positions` are the indices of `samples` in the call's list; the
    client uses them to convert row handles to ids. `more`: further facts of a subclass, which `describe` receives."""

    def __init__(
        self,
        *,
        partition: str,
        samples: Sequence[str],
        total: int | None = None,
        positions: Sequence[int] = (),
        **more: Any,
    ) -> None:
        count = len(samples) if total is None else total
        super().__init__(
            self.describe(first_few(samples, count), partition=partition, **more),
            partition=partition,
            samples=list(samples),
            total=count,
            positions=[int(position) for position in positions],
            **more,
        )

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        """Return the message. names: the first few samples, as text."""
        raise NotImplementedError

    def with_ids(self, ids: Sequence[str]) -> _SamplesError:
        """Return a copy of the error that names ids. `ids` is the call's list, indexed by `positions`."""
        facts = dict(self.facts)
        if facts["positions"]:
            facts["samples"] = [ids[position] for position in facts["positions"]]
        return type(self)(**facts)


def _removal_reasons(*, evicted: int, lost: int, causes: Sequence[str], **_: Any) -> str:
    """Return the known reasons why samples are missing, as a suffix for a message; "" if none is known. Other facts of
    the error are ignored."""
    reasons = [f"{evicted} of them were evicted because the partition was full"] if evicted else []
    if lost:
        reasons.append(f"{lost} of them were lost {', '.join(causes) or 'with their storage unit'}")
    return f" ({'; '.join(reasons)})" if reasons else ""


class SampleNotFoundError(_SamplesError):
    """Samples do not exist. `partition` is "" if all partitions were searched. `evicted` counts the samples known to be
    evicted from a full partition. `lost` counts the samples whose storage unit was lost or damaged. `causes` describes
    the first few losses."""

    def __init__(self, *, evicted: int = 0, lost: int = 0, causes: Sequence[str] = (), **facts: Any) -> None:
        super().__init__(evicted=evicted, lost=lost, causes=list(causes)[:SHOWN], **facts)

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        where = f"partition {partition!r}" if partition else "the service"
        return f"{where} has no live sample {names}: it was never put, or it was cleared{_removal_reasons(**more)}"


class FieldNotProducedError(_SamplesError):
    """The samples exist, but the field was never written for them."""

    def __init__(self, *, field: str, **facts: Any) -> None:
        super().__init__(field=field, **facts)

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        return (
            f"field {more['field']!r} has not been produced for sample {names} of partition {partition!r}; put it "
            "first, or name the field in claim_meta, which waits for it"
        )


class StaleSampleError(_SamplesError):
    """Samples of a meta were cleared after the meta was created. With `task`, the samples exist, but the claim of that
    task no longer holds them. `evicted`, `lost` and `causes`: as in `SampleNotFoundError`."""

    def __init__(
        self, *, task: str = "", evicted: int = 0, lost: int = 0, causes: Sequence[str] = (), **facts: Any
    ) -> None:
        super().__init__(task=task, evicted=evicted, lost=lost, causes=list(causes)[:SHOWN], **facts)

    def describe(self, names: str, *, partition: str, **more: Any) -> str:
        if more["task"]:
            return (
                f"sample {names} of partition {partition!r} is not held by the claim of this meta: its lease ended (or "
                f"it was acknowledged), and another claim of task {more['task']!r} may hold it now. It was left "
                "unchanged; the call was executed for all other samples. Use a longer lease_s, or extend the lease "
                "before it ends."
            )
        reasons = _removal_reasons(**more)
        return (
            f"sample {names} of partition {partition!r} was cleared after this meta was made{reasons}. A sample put "
            "later under the same id is a different sample. Nothing was read or written; get a new meta."
        )
