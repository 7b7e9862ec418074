"""Names of workers: a group name followed by a path of ranks. No Ray, no sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SEPARATOR = ":"


@dataclass(frozen=True, slots=True, init=False)
class WorkerAddress:
    """`"g"` is the root of group g, `"g:0"` its worker of rank 0, `"g:0:1"` the child process of rank 1 that g:0
    started.

    root_group_name: a non-empty name without a colon; ranks: the rank path below it, or an int for a path of length
    one. Immutable, hashable, not ordered. ValueError for an invalid name or a negative rank, TypeError for a name
    that is not a str or a rank that is not an int.
    """

    root_group_name: str
    rank_path: tuple[int, ...]

    def __init__(self, root_group_name: str, ranks: int | Iterable[int] = ()) -> None:
        if not isinstance(root_group_name, str):
            raise TypeError(f"group name {root_group_name!r} is {type(root_group_name).__name__}, expected str")
        if not root_group_name or SEPARATOR in root_group_name:
            raise ValueError(f"group name {root_group_name!r} must not be empty and must not contain {SEPARATOR!r}")
        # A str becomes one rank, which raises TypeError.
        path = tuple(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else (ranks,)
        for rank in path:
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise TypeError(f"rank {rank!r} of group {root_group_name!r} is {type(rank).__name__}, expected int")
            if rank < 0:
                raise ValueError(f"rank {rank} of group {root_group_name!r} is negative; ranks count from 0")
        object.__setattr__(self, "root_group_name", root_group_name)
        object.__setattr__(self, "rank_path", path)

    @classmethod
    def from_name(cls, name: str) -> WorkerAddress:
        """Return the address for a name from `get_name`. ValueError for any other string."""
        root, *ranks = name.split(SEPARATOR)
        if not all(rank.isascii() and rank.isdigit() for rank in ranks):
            raise ValueError(f"worker name {name!r} is not a group name followed by ranks, such as 'group:0'")
        return cls(root, tuple(int(rank) for rank in ranks))

    def get_name(self) -> str:
        """Return the name, such as "g:0:1", which is unique among the workers of a job."""
        return SEPARATOR.join((self.root_group_name, *map(str, self.rank_path)))

    @property
    def rank(self) -> int | None:
        """The last rank of the path, which is the worker's rank among its siblings. None for a root."""
        return self.rank_path[-1] if self.rank_path else None

    def get_child_address(self, rank: int) -> WorkerAddress:
        """Return the address of the child of that rank."""
        return WorkerAddress(self.root_group_name, (*self.rank_path, rank))

    def get_parent_address(self) -> WorkerAddress:
        """Return the parent's address. ValueError for a root, which has no parent."""
        if not self.rank_path:
            raise ValueError(f"the address {self.root_group_name!r} names a whole group, so it has no parent")
        return WorkerAddress(self.root_group_name, self.rank_path[:-1])

    def __reduce__(self) -> tuple[type[WorkerAddress], tuple[str, tuple[int, ...]]]:
        return WorkerAddress, (self.root_group_name, self.rank_path)

    def __str__(self) -> str:
        return self.get_name()
