"""Base class of the package's errors: facts are attributes, and an error can be rebuilt from its facts."""

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
