"""Image of a ledger's whole state: an object graph encoded as bytes without pickle.

Objects, dicts, lists, sets and arrays are entries of a table and refer to each other by table index. This preserves
shared references and cycles, and allows graphs of any depth. All other values (numbers, strings, tuples, enums,
commands, specs, errors) are encoded inline. An image stores classes by name, and only those in `_STORED`.

A letter says how a value or an entry is encoded. Inline: i large int, t tuple, n named tuple, f
frozenset, e enum member, s struct (command), x error, c dataclass. Entries: a array, A array of
objects, l list, d dict, S set, o object of another class.
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
from dataplane.ledger.commands import inputs, inspection, requests, results, short, values
from dataplane.ledger.state import (
    extents,
    fields,
    free_space,
    partition,
    rows,
    sessions,
    state,
    tags,
    tasks,
    tombstones,
    units,
    watches,
)

FORMAT = 13
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_INT_BITS = 63


class ImageError(ValueError):
    """The bytes are not a ledger image that this version can read."""


def dump(roots: list[Any]) -> bytes:
    """Encode everything reachable from `roots`. Raises TypeError for a value of an unsupported type."""
    writer = _Writer()
    top = [writer.encode(root) for root in roots]
    writer.drain()
    return msgspec.msgpack.encode([FORMAT, top, writer.table])


def load(image: bytes) -> list[Any]:
    """Decode the roots from bytes written by `dump`. Raises `ImageError` for other bytes."""
    try:
        content = msgspec.msgpack.decode(image)  # [format, roots, table]
        image_format = content[0] if isinstance(content, list) and content else "?"
        if image_format != FORMAT:
            raise ImageError(f"the image of the state has format {image_format}, expected {FORMAT}")
        _, top, table = content
        reader = _Reader(table)
        return [reader.decode(item) for item in top]
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"the image of the state is damaged: {error!r}") from error


class _Writer:
    """Encoder. Each object with an identity gets an entry (kind, content) in `table`; `drain` writes the entries.

    An object's index in the table is assigned at the first reference. `_indices`: by `id()`;
    `_alive`: the objects by index, kept alive so that no id is reused; `_written`: number of entries in `table`."""

    def __init__(self) -> None:
        self.table: list[list[Any]] = []
        self._indices: dict[int, int] = {}
        self._alive: list[Any] = []
        self._written = 0

    def encode(self, value: Any) -> Any:
        """Encode a value inline, or as a reference [index] to its entry in the table. Other inline values than plain
        ones are lists that begin with a letter (see the module's docstring)."""
        kind = type(value)
        if kind is int and value.bit_length() > _INT_BITS:
            return ["i", str(value)]
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return ["t", [self.encode(item) for item in value]]
        if isinstance(value, tuple):
            return ["n", _class_name(kind), [self.encode(item) for item in value]]
        if kind is frozenset:
            return ["f", [self.encode(item) for item in sorted(value)]]
        if isinstance(value, enum.Enum):
            return ["e", _class_name(kind), value.value]
        if isinstance(value, msgspec.Struct):
            return ["s", _class_name(kind), [self.encode(getattr(value, name)) for name in value.__struct_fields__]]
        if isinstance(value, DataPlaneError):
            return ["x", *to_wire(value)]
        if dataclasses.is_dataclass(kind):
            return [
                "c",
                _class_name(kind),
                [self.encode(getattr(value, field.name)) for field in dataclasses.fields(kind)],
            ]
        return [self._index_of(value)]

    def _index_of(self, value: Any) -> int:
        """Return the index of the object's entry in the table, assigned at the first call."""
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self._alive)
            self._alive.append(value)
        return index

    def drain(self) -> None:
        """Write the entries of all referenced objects, including those that the entries refer to."""
        while self._written < len(self._alive):
            self.table.append(self._encode_entry(self._alive[self._written]))
            self._written += 1

    def _encode_entry(self, value: Any) -> list[Any]:
        """Encode the content of an object with an identity. The letters are explained in the module's docstring."""
        if isinstance(value, np.ndarray):
            if value.dtype == object:
                return ["A", [self.encode(item) for item in value.tolist()]]
            return ["a", value.dtype.str, value.tobytes()]
        if type(value) is list:
            return ["l", value if _all_plain(value) else [self.encode(item) for item in value]]
        if type(value) is dict:
            keys = list(value)
            encoded_keys = keys if _all_plain(keys) else [self.encode(key) for key in keys]
            return ["d", encoded_keys, [self.encode(item) for item in value.values()]]
        if type(value) is set:
            return ["S", [self.encode(item) for item in sorted(value)]]
        attributes = vars(value)
        return ["o", _class_name(type(value)), list(attributes), [self.encode(item) for item in attributes.values()]]


def _all_plain(values: list[Any]) -> bool:
    """Whether msgpack can encode all of the values as they are. Faster than a call of `_Writer.encode` for each."""
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        return False
    return int not in kinds or all(value.bit_length() <= _INT_BITS for value in values if type(value) is int)


def _by_name(modules: Iterable[ModuleType]) -> dict[str, type]:
    """Return the public classes that the modules define, except protocols, by name. An image stores class names without
    modules, so that classes can move between modules. Raises TypeError for duplicate names."""
    classes: dict[str, type] = {}
    for module in modules:
        for name, kind in vars(module).items():
            is_own_class = isinstance(kind, type) and kind.__module__ == module.__name__ and not name.startswith("_")
            if not is_own_class or getattr(kind, "_is_protocol", False):
                continue
            if name in classes:
                raise TypeError(f"two classes are named {name}: {classes[name].__module__} and {module.__name__}")
            classes[name] = kind
    return classes


_STORED = _by_name(
    (
        *(number_set, types, inputs, inspection, requests, results, short, values),
        *(extents, fields, free_space, partition),
        *(
            reservations,
            rows,
            sessions,
            state,
            tags,
            tasks,
            tombstones,
            units,
            watches,
        ),
    )
)
"""The classes that an image may contain."""


def _class_name(kind: type) -> str:
    if _STORED.get(kind.__name__) is not kind:
        raise TypeError(f"an image cannot contain a {kind.__module__}.{kind.__qualname__}")
    return kind.__name__


class _Reader:
    """Decoder of a `_Writer`'s table. Creates all objects first, then fills them, because entries may refer to each
    other. `_objects`: the objects by table index. `_FILL` has the functions that fill them, by the letter of the entry;
    an array of numbers is complete at its creation."""

    def __init__(self, table: list[list[Any]]) -> None:
        self._objects = [self._create_empty(entry) for entry in table]
        for target, entry in zip(self._objects, table, strict=True):
            fill = _FILL.get(entry[0])
            if fill is not None:
                fill(self, target, entry)

    def decode(self, encoded: Any) -> Any:
        """Decode an inline value (letters: see the module's docstring) or a reference [index]: the inverse of
        `_Writer.encode`."""
        if type(encoded) is not list:
            return encoded
        match encoded:
            case [int(index)]:
                return self._objects[index]
            case ["t", items]:
                return tuple([self.decode(item) for item in items])
            case ["n", name, items]:
                return self._find_class(name)(*map(self.decode, items))
            case ["i", text]:
                return int(text)
            case ["f", items]:
                return frozenset([self.decode(item) for item in items])
            case ["e", name, value]:
                return self._find_class(name)(value)
            case ["x", name, facts]:
                return from_wire(name, facts)
            case ["s", name, values]:
                kind = self._find_class(name)
                return kind(**dict(zip(kind.__struct_fields__, map(self.decode, values), strict=True)))
            case ["c", name, values]:
                kind = self._find_class(name)
                names = [field.name for field in dataclasses.fields(kind)]
                return kind(**dict(zip(names, map(self.decode, values), strict=True)))
        raise ImageError(f"unknown value {encoded[:1]}")

    def _find_class(self, name: str) -> Any:
        """Return the class that an image names, or raise `ImageError`."""
        kind = _STORED.get(name)
        if kind is None:
            raise ImageError(f"unknown class {name!r}")
        return kind

    def _create_empty(self, entry: list[Any]) -> Any:
        """Create the object of an entry, which begins with its letter (see the module's docstring). Containers and
        instances are empty until all objects exist; then the function in `_FILL` fills them."""
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
                kind = self._find_class(entry[1])
                return kind.__new__(kind)
        raise ImageError(f"unknown entry {entry[0]!r}")

    def _fill_array(self, target: Any, entry: list[Any]) -> None:
        target[:] = [self.decode(item) for item in entry[1]]

    def _fill_list(self, target: list[Any], entry: list[Any]) -> None:
        target.extend(map(self.decode, entry[1]))

    def _fill_set(self, target: set[Any], entry: list[Any]) -> None:
        target.update(map(self.decode, entry[1]))

    def _fill_dict(self, target: dict[Any, Any], entry: list[Any]) -> None:
        target.update(zip(map(self.decode, entry[1]), map(self.decode, entry[2]), strict=True))

    def _fill_object(self, target: Any, entry: list[Any]) -> None:
        vars(target).update(zip(entry[2], map(self.decode, entry[3]), strict=True))


_FILL: dict[str, Callable[[_Reader, Any, list[Any]], None]] = {
    "A": _Reader._fill_array,
    "l": _Reader._fill_list,
    "S": _Reader._fill_set,
    "d": _Reader._fill_dict,
    "o": _Reader._fill_object,
}
