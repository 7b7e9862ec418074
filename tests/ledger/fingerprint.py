"""A digest of a ledger's state, which is equal for two states reached by the same steps."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import DataPlaneError
from dataplane.ledger import Ledger


class _Walk:
    """Feeds an object graph to a hash, `sum`. Dicts, sets and plain objects get a number at the first visit (`seen`, by
    id), so that cycles end. `alive` keeps them, so that no id is reused."""

    def __init__(self) -> None:
        self.sum = hashlib.blake2b(digest_size=16)
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []

    def add_text(self, *parts: object) -> None:
        self.sum.update("\0".join(map(str, parts)).encode("utf-8", "surrogatepass") + b"\1")

    def add(self, value: Any) -> None:
        """Add the value, and everything reachable from it, to the hash. Only values that can be part of a cycle get a
        number; the others are added each time they occur."""
        if value is None or isinstance(value, str | bool | int | float | bytes | enum.Enum):
            self.add_text(type(value).__name__, repr(value))
        elif isinstance(value, np.ndarray):
            self.add_array(value)
        elif isinstance(value, list | tuple):
            self.add_text("sequence", len(value))
            for item in value:
                self.add(item)
        elif isinstance(value, msgspec.Struct):
            self.add_pairs(type(value).__name__, [(name, getattr(value, name)) for name in value.__struct_fields__])
        elif isinstance(value, DataPlaneError):
            self.add_pairs(type(value).__name__, sorted(value.facts.items()))
        elif dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            self.add_pairs(type(value).__name__, [(field.name, getattr(value, field.name)) for field in fields])
        elif id(value) in self.seen:
            self.add_text("again", self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            self.alive.append(value)
            self.add_compound(value)

    def add_array(self, value: np.ndarray[Any, Any]) -> None:
        """Add dtype, shape and elements."""
        self.add_text("array", value.dtype, value.shape)
        if value.dtype == object:
            for item in value.flat:
                self.add(item)
        else:
            self.sum.update(np.ascontiguousarray(value).tobytes())

    def add_compound(self, value: Any) -> None:
        """Add the content of a dict, a set or a plain object. Raises TypeError for other objects."""
        if isinstance(value, dict):
            self.add_pairs("dict", list(value.items()))
        elif isinstance(value, set | frozenset):
            self.add_text("set", len(value))
            for item in sorted(value):
                self.add(item)
        elif hasattr(value, "__dict__"):
            self.add_pairs(type(value).__name__, sorted(vars(value).items()))
        else:
            raise TypeError(f"cannot compute a digest of a {type(value).__name__}")

    def add_pairs(self, name: str, items: list[tuple[Any, Any]]) -> None:
        """Add the type name, then keys and values in this order."""
        self.add_text(name, len(items))
        for key, item in items:
            self.add(key)
            self.add(item)


def digest(value: Any) -> bytes:
    """Return a 16-byte digest of everything reachable from `value`, including the order of dicts."""
    walk = _Walk()
    walk.add(value)
    return walk.sum.digest()


def fingerprint(ledger: Ledger) -> bytes:
    """Return a digest of everything on which the ledger's outputs depend."""
    return digest(ledger._roots())
