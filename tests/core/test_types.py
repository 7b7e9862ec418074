"""Field specs normalise, refuse and compare."""

from __future__ import annotations

import pytest
import torch

from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec, field_spec


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_sizes_are_those_of_torch(name: str) -> None:
    assert torch.empty((), dtype=getattr(torch, name)).element_size() == DTYPE_BYTES[name]


def test_parts_are_normalised() -> None:
    spec = FieldSpec("jagged", torch.bfloat16, [3, 2])  # type: ignore[arg-type]
    assert (spec.kind, spec.dtype, spec.inner) == (FieldKind.JAGGED, "bfloat16", (3, 2))
    assert spec.unit_bytes == 12
    assert spec.settled


@pytest.mark.parametrize(
    ("spec", "settled"),
    [
        (FieldSpec(), False),
        (FieldSpec("dense"), False),
        (FieldSpec("dense", "int64"), False),
        (FieldSpec("ragged", "int64"), True),
        (FieldSpec("object"), True),
    ],
)
def test_settled(spec: FieldSpec, settled: bool) -> None:
    assert spec.settled is settled


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="quantum"):
        FieldSpec("quantum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int7"):
        FieldSpec("dense", "int7")
    with pytest.raises(TypeError):
        field_spec(7)


def test_an_open_spec_accepts_what_it_leaves_open() -> None:
    settled = FieldSpec("dense", "int64", (2,))
    assert FieldSpec().accepts(settled)
    assert FieldSpec("dense").accepts(settled)
    assert not FieldSpec("jagged").accepts(settled)
    assert not FieldSpec(None, "int32").accepts(settled)
    assert not FieldSpec(None, None, (3,)).accepts(settled)
    assert field_spec({"kind": "dense"}).accepts(settled)


@pytest.mark.parametrize("inner", [(1 << 62,), (0, 1 << 41), (1 << 21, 1 << 21), (1,) * 33])
def test_a_shape_no_row_can_have_is_refused(inner: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at most 32 dimensions"):
        FieldSpec("dense", "int64", inner)
