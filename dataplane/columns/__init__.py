"""Columns: what a put's fields become on their way into memory, and what memory becomes on its way out."""

from dataplane.columns.append import appended
from dataplane.columns.check import checked
from dataplane.columns.decode import (
    Column,
    Empty,
    RowSource,
    SharedOffsets,
    assemble,
    decode,
    decode_batch,
    decode_columns,
    decode_padded,
    decode_views,
    fresh,
    warm,
)
from dataplane.columns.encode import EncodedColumn, PerToken, Shared, encode_fields, require_fields
from dataplane.columns.specs import declared_specs
from dataplane.columns.values import FlatValues

__all__ = [
    "Column",
    "Empty",
    "EncodedColumn",
    "FlatValues",
    "PerToken",
    "RowSource",
    "Shared",
    "SharedOffsets",
    "appended",
    "assemble",
    "checked",
    "declared_specs",
    "decode",
    "decode_batch",
    "decode_columns",
    "decode_padded",
    "decode_views",
    "encode_fields",
    "fresh",
    "require_fields",
    "warm",
]
