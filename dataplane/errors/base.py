"""What every error of the package has: facts that are attributes, and that it can be made again from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

SHOWN = 5


def first_few(names: Sequence[object], total: int | None = None) -> str:
    """`names` for a message: at most five, then how many more (`total` when `names` is already cut)."""
    count = len(names) if total is None else total
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown if count <= min(SHOWN, len(names)) else f"{shown} and {count - min(SHOWN, len(names))} more"


def rebuild(cls: Callable[..., DataPlaneError], facts: dict[str, Any]) -> DataPlaneError:
    return cls(**facts)


class DataPlaneError(Exception):
    """Root of the tree. `facts` are the keyword arguments the error was made with; each is an attribute too.
    `grpc_status` is the name of the gRPC status that it travels as."""

    grpc_status: ClassVar[str]

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.facts)
