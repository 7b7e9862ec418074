"""Image of a ledger's whole state: an object graph encoded as bytes without pickle.

Objects, dicts, lists, sets and arrays are entries of a table and refer to each other by table index. This preserves
shared references and cycles, and allows graphs of any depth. All other values (numbers, strings, tuples, enums,
commands, specs, errors) are encoded inline. An image stores classes by name, and only those in `_STORED`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from dataplane.core import number_set, types
from dataplane.errors import DataPlaneError, from_wire, to_wire
from dataplane.ledger.allocation import reservations
from dataplane.ledger.commands import inputs, inspection, outputs, parts, requests, results
from dataplane.ledger.state import (
    eviction_outlook,
    extents,
    fields,
    free_space,
    limits,
    partition,
    relocations,
    rows,
    sessions,
    snapshot,
    state,
    tags,
    tasks,
    tombstones,
    units,
    wait_queues,
    watches,
)

FORMAT = 8
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_INT_BITS = 63


class ImageError(ValueError):
    """The bytes are not a ledger image that this version can read."""


def dump(roots: list[Any]) -> bytes:
    """Encode everything reachable from `roots`. Raises TypeError for a value of an unsupported type."""
    writer = _Writer()
    top = [writer.value(root) for root in roots]
    writer.drain()
    return msgspec.msgpack.encode([FORMAT, top, writer.table])


def load(image: bytes) -> list[Any]:
    """Decode the roots from bytes written by `dump`. Raises `ImageError` for other bytes."""
    try:
        found = msgspec.msgpack.decode(image)
        if not isinstance(found, list) or not found or found[0] != FORMAT:
            raise ImageError(
                f"image has format {found[0] if isinstance(found, list) and found else '?'}, expected {FORMAT}"
            )
        _, top, table = found
        reader = _Reader(table)
        return [reader.value(item) for item in top]
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"damaged: {error!r}") from error


class _Writer:
    """Encoder. Each object with an identity gets an entry (kind, content) in `table`; `drain` writes the entries."""

    def __init__(self) -> None:
        self.table: list[list[Any]] = []
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []
        self._written = 0

    def value(self, value: Any) -> Any:
        """Encode a value inline, or as a reference to its entry in the table."""
        kind = type(value)
        if kind is int and value.bit_length() > _INT_BITS:
            return ["i", str(value)]
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return ["t", [self.value(item) for item in value]]
        if kind is frozenset:
            return ["f", [self.value(item) for item in sorted(value)]]
        if isinstance(value, enum.Enum):
            return ["e", _name(kind), value.value]
        if isinstance(value, msgspec.Struct):
            return ["s", _name(kind), [self.value(getattr(value, name)) for name in value.__struct_fields__]]
        if isinstance(value, DataPlaneError):
            return ["x", *to_wire(value)]
        if dataclasses.is_dataclass(kind):
            return ["c", _name(kind), [self.value(getattr(value, field.name)) for field in dataclasses.fields(kind)]]
        return [self._place(value)]

    def _place(self, value: Any) -> int:
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self._alive)
            self._alive.append(value)
        return place

    def drain(self) -> None:
        """Write the entries of all referenced objects."""
        while self._written < len(self._alive):
            self.table.append(self._entry(self._alive[self._written]))
            self._written += 1

    def _entry(self, value: Any) -> list[Any]:
        """Encode the content of an object with an identity."""
        if isinstance(value, np.ndarray):
            if value.dtype == object:
                return ["A", [self.value(item) for item in value.tolist()]]
            return ["a", value.dtype.str, value.tobytes()]
        if type(value) is list:
            return ["l", value if _all_plain(value) else [self.value(item) for item in value]]
        if type(value) is dict:
            keys = list(value)
            written = keys if _all_plain(keys) else [self.value(key) for key in keys]
            return ["d", written, [self.value(item) for item in value.values()]]
        if type(value) is set:
            return ["S", [self.value(item) for item in sorted(value)]]
        attributes = vars(value)
        return ["o", _name(type(value)), list(attributes), [self.value(item) for item in attributes.values()]]


def _all_plain(values: list[Any]) -> bool:
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        return False
    return int not in kinds or all(value.bit_length() <= _INT_BITS for value in values if type(value) is int)


def _by_name(modules: Iterable[ModuleType]) -> dict[str, type]:
    """Return the public classes that the modules define, by name. An image stores class names without modules, so that
    classes can move between modules. Raises TypeError for duplicate names."""
    found: dict[str, type] = {}
    for module in modules:
        for name, kind in vars(module).items():
            ours = isinstance(kind, type) and kind.__module__ == module.__name__ and not name.startswith("_")
            if not ours or getattr(kind, "_is_protocol", False):
                continue
            if name in found:
                raise TypeError(f"two classes are named {name}: {found[name].__module__} and {module.__name__}")
            found[name] = kind
    return found


_STORED = _by_name(
    (
        *(number_set, types, inputs, inspection, outputs, parts, requests, results),
        *(eviction_outlook, extents, fields, free_space, limits, partition),
        *(
            reservations,
            relocations,
            rows,
            sessions,
            snapshot,
            state,
            tags,
            tasks,
            tombstones,
            units,
            wait_queues,
            watches,
        ),
    )
)
"""The classes that an image may contain."""


def _name(kind: type) -> str:
    if _STORED.get(kind.__name__) is not kind:
        raise TypeError(f"an image cannot contain a {kind.__module__}.{kind.__qualname__}")
    return kind.__name__


class _Reader:
    def __init__(self, table: list[list[Any]]) -> None:
        self._made = [self._shell(entry) for entry in table]
        for made, entry in zip(self._made, table, strict=True):
            fill = _FILL.get(entry[0])
            if fill is not None:
                fill(self, made, entry)

    def value(self, written: Any) -> Any:
        """Decode an inline value or a reference."""
        if type(written) is not list:
            return written
        match written:
            case [int(place)]:
                return self._made[place]
            case ["t", items]:
                return tuple([self.value(item) for item in items])
            case ["i", text]:
                return int(text)
            case ["f", items]:
                return frozenset([self.value(item) for item in items])
            case ["e", name, value]:
                return self._class(name)(value)
            case ["x", name, facts]:
                return from_wire(name, facts)
            case ["s", name, values]:
                kind = self._class(name)
                return kind(**dict(zip(kind.__struct_fields__, map(self.value, values), strict=True)))
            case ["c", name, values]:
                kind = self._class(name)
                names = [field.name for field in dataclasses.fields(kind)]
                return kind(**dict(zip(names, map(self.value, values), strict=True)))
        raise ImageError(f"unknown value {written[:1]}")

    def _class(self, name: str) -> Any:
        found = _STORED.get(name)
        if found is None:
            raise ImageError(f"unknown class {name!r}")
        return found

    def _shell(self, entry: list[Any]) -> Any:
        """Create the object of an entry. Containers and instances are empty until all objects exist."""
        match entry[0]:
            case "a":
                return np.frombuffer(entry[2], np.dtype(entry[1])).copy()
            case "A":
                return np.empty(len(entry[1]), object)
            case "l":
                return []
            case "d":
                return {}
            case "S":
                return set()
            case "o":
                kind = self._class(entry[1])
                return kind.__new__(kind)
        raise ImageError(f"unknown entry {entry[0]!r}")

    def _fill_array(self, made: Any, entry: list[Any]) -> None:
        made[:] = [self.value(item) for item in entry[1]]

    def _fill_list(self, made: list[Any], entry: list[Any]) -> None:
        made.extend(map(self.value, entry[1]))

    def _fill_set(self, made: set[Any], entry: list[Any]) -> None:
        made.update(map(self.value, entry[1]))

    def _fill_dict(self, made: dict[Any, Any], entry: list[Any]) -> None:
        made.update(zip(map(self.value, entry[1]), map(self.value, entry[2]), strict=True))

    def _fill_object(self, made: Any, entry: list[Any]) -> None:
        vars(made).update(zip(entry[2], map(self.value, entry[3]), strict=True))


_FILL: dict[str, Callable[[_Reader, Any, list[Any]], None]] = {
    "A": _Reader._fill_array,
    "l": _Reader._fill_list,
    "S": _Reader._fill_set,
    "d": _Reader._fill_dict,
    "o": _Reader._fill_object,
}
