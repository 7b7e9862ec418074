"""The plan: the measured rows, their sizes and their systems."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.cases import Case, Op
from benchmarks.measure import MIN_REPETITIONS
from benchmarks.payload import BatchSpec, Shape

CEILING = ("memcpy-1", "memcpy-all")
RAY = ("ray-numpy", "ray-tensors")
STORES = ("local", "remote", "TransferQueue", *RAY)
ALL = (*STORES, "raw-zmq", *CEILING)
OURS = ("local", "remote")
STORED = (Op.PUT, Op.READ)

TOKENS = BatchSpec(shape=Shape.TOKENS, rows=512, length=1848)
"""About 19 MB: 20 bytes a token."""
DENSE = BatchSpec(shape=Shape.DENSE, rows=1024, length=8192, fields=9)
"""302 MB."""
QUICK_DENSE = replace(DENSE, fields=3)
FIXED_BYTES = 256_000_000
QUICK_BYTES = 64_000_000


BUDGET_ROUNDS = 15
"""Rounds of a group that a budget is computed from. Sweeps, and all groups of a quick run, have
`MIN_REPETITIONS`."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that take turns in the same rounds, so that a budget can be a quotient of two of them."""

    cases: tuple[Case, ...]
    rounds: int

    @property
    def name(self) -> str:
        return ", ".join(case.name for case in self.cases)


def plan(*, quick: bool) -> list[Group]:
    """Return all groups. `quick` has fewer points in the sweeps and fewer rounds."""
    judged = [*_alone(*_main(quick), *_large(quick)), _views(quick), *(_fields(op, (1, 32), quick) for op in STORED)]
    between = () if quick else (2, 4, 8, 16)
    sweeps = [_fields(op, (count,), quick) for count in between for op in STORED]
    sweeps += _alone(*_rows(quick), *_lengths(quick), *_shapes())
    return [
        *(Group(cases=cases, rounds=MIN_REPETITIONS if quick else BUDGET_ROUNDS) for cases in judged),
        *(Group(cases=cases, rounds=MIN_REPETITIONS) for cases in sweeps),
    ]


def _alone(*cases: Case) -> list[tuple[Case, ...]]:
    return [(case,) for case in cases]


def _main(quick: bool) -> tuple[Case, ...]:
    step = (*OURS, "journal") if quick else (*OURS, "journal", "TransferQueue")
    return (
        Case(name="put 19 MB jagged", op=Op.PUT, batch=TOKENS, systems=ALL),
        Case(name="8 padded slices", op=Op.SLICES, batch=TOKENS, systems=ALL),
        Case(name="read 19 MB", op=Op.READ, batch=TOKENS, systems=ALL),
        Case(name="single-sample put", op=Op.SINGLE, batch=TOKENS, systems=(*OURS, "TransferQueue", *RAY)),
        Case(name="GRPO step", op=Op.STEP, batch=TOKENS, systems=step),
    )


def _large(quick: bool) -> tuple[Case, ...]:
    """Nine fields of 1024 x 8192 float32, or three."""
    systems = ("local", "remote", "TransferQueue", "ray-numpy", "raw-zmq", *CEILING)
    batch = QUICK_DENSE if quick else DENSE
    return (
        Case(name="put large dense", op=Op.PUT, batch=batch, systems=systems),
        Case(name="read large dense", op=Op.READ, batch=batch, systems=systems),
    )


def _views(quick: bool) -> tuple[Case, ...]:
    """Whole-batch reads without a copy, of few bytes and of many."""
    systems = ("local", "views", "round-trip")
    return (
        Case(name="19 MB as views", op=Op.READ, batch=TOKENS, systems=systems),
        Case(name="large dense as views", op=Op.READ, batch=QUICK_DENSE if quick else DENSE, systems=systems),
    )


def _fields(op: Op, counts: tuple[int, ...], quick: bool) -> tuple[Case, ...]:
    """The same number of bytes in an increasing number of fields."""
    size = QUICK_BYTES if quick else FIXED_BYTES
    return tuple(
        Case(
            name=f"{op.value} fixed bytes in {count} field{'s' * (count > 1)}",
            op=op,
            batch=BatchSpec(shape=Shape.DENSE, rows=512, length=size // (512 * 4 * count), fields=count),
            systems=("local",) if quick else ("local", "TransferQueue"),
        )
        for count in counts
    )


def _rows(quick: bool) -> tuple[Case, ...]:
    """The same number of bytes in an increasing number of rows."""
    return tuple(
        Case(
            name=f"{op.value} 19 MB in {rows} rows",
            op=op,
            batch=replace(TOKENS, rows=rows, length=TOKENS.rows * TOKENS.length // rows),
            systems=("local",) if quick else ("local", "remote", "TransferQueue"),
        )
        for rows in ((64, 8192) if quick else (64, 256, 1024, 4096, 8192))
        for op in (Op.PUT, Op.SLICES)
    )


def _lengths(quick: bool) -> tuple[Case, ...]:
    """256 rows with an increasing number of tokens."""
    return tuple(
        Case(
            name=f"{op.value} 256 rows of {length}",
            op=op,
            batch=replace(TOKENS, rows=256, length=length),
            systems=("local",) if quick else ("local", "remote", "TransferQueue"),
        )
        for length in ((32, 8192) if quick else (32, 256, 2048, 8192, 32768))
        for op in (Op.PUT, Op.SLICES)
    )


def _shapes() -> tuple[Case, ...]:
    mixed = BatchSpec(shape=Shape.MIXED, rows=512, length=1024, fields=9)
    systems = ("local", "remote", "TransferQueue", "ray-numpy")
    return (
        Case(name="put a third each", op=Op.PUT, batch=mixed, systems=systems),
        Case(name="read a third each", op=Op.READ, batch=mixed, systems=systems),
    )
