"""Which rows are measured, with what sizes, on which systems."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.cases import Case, Op
from benchmarks.payload import BatchSpec, Shape

CEILING = ("memcpy-1", "memcpy-all")
RAY = ("ray-numpy", "ray-tensors")
STORES = ("local", "remote", "TransferQueue", *RAY)
ALL = (*STORES, "raw-zmq", *CEILING)
OURS = ("local", "remote")
LASTING = ("journal", "disk")

TOKENS = BatchSpec(shape=Shape.TOKENS, rows=512, length=1848)
"""About 19 MB: 20 bytes a token."""
DENSE = BatchSpec(shape=Shape.DENSE, rows=1024, length=8192, fields=9)
"""302 MB."""
QUICK_DENSE = replace(DENSE, fields=3)
FIXED_BYTES = 256_000_000
QUICK_BYTES = 64_000_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """cases: timed on several systems in turns. repetitions: of each case, for each system."""

    cases: tuple[Case, ...]
    repetitions: int


def plan(*, quick: bool) -> Plan:
    """All rows; `quick` has the same rows with fewer points in the sweeps and fewer repetitions."""
    cases = (*_main(), *_large(quick), *_fields(quick), *_rows(quick), *_lengths(quick), *_shapes())
    return Plan(cases=cases, repetitions=7 if quick else 15)


def _main() -> tuple[Case, ...]:
    return (
        Case(name="put 19 MB jagged", op=Op.PUT, batch=TOKENS, systems=ALL),
        Case(name="8 padded slices", op=Op.SLICES, batch=TOKENS, systems=ALL),
        Case(name="read 19 MB", op=Op.READ, batch=TOKENS, systems=("views", *ALL)),
        Case(name="single-sample put", op=Op.SINGLE, batch=TOKENS, systems=(*OURS, "TransferQueue", *RAY)),
        Case(name="GRPO step", op=Op.STEP, batch=TOKENS, systems=(*OURS, *LASTING, "TransferQueue")),
    )


def _large(quick: bool) -> tuple[Case, ...]:
    """Nine fields of 1024 x 8192 float32, or three."""
    systems = ("local", "remote", "TransferQueue", "ray-numpy", "raw-zmq", *CEILING)
    batch = QUICK_DENSE if quick else DENSE
    return (
        Case(name="put large dense", op=Op.PUT, batch=batch, systems=systems),
        Case(name="read large dense", op=Op.READ, batch=batch, systems=("views", *systems)),
    )


def _fields(quick: bool) -> tuple[Case, ...]:
    """The same bytes in more and more fields."""
    size = QUICK_BYTES if quick else FIXED_BYTES
    return tuple(
        Case(
            name=f"{op.value} fixed bytes in {count} field{'s' * (count > 1)}",
            op=op,
            batch=BatchSpec(shape=Shape.DENSE, rows=512, length=size // (512 * 4 * count), fields=count),
            systems=("local",) if quick else ("local", "TransferQueue"),
        )
        for count in ((1, 32) if quick else (1, 2, 4, 8, 16, 32))
        for op in (Op.PUT, Op.READ)
    )


def _rows(quick: bool) -> tuple[Case, ...]:
    """The same bytes in more and more rows."""
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
    """256 rows of more and more tokens."""
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
