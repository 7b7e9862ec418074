"""Columns: the fields of a put encoded for storage, and stored rows decoded to values."""

from dataplane.data.columns.decode import (
    Column,
    Empty,
    SharedOffsets,
    StoredSubset,
    as_tensordict,
    assemble,
    checked,
    decode,
    decode_batch,
    decode_columns,
    decode_padded,
    decode_views,
    fresh,
    from_pool,
    widened,
)
from dataplane.data.columns.device_decode import decode_on_device, use_on_current_stream
from dataplane.data.columns.encode import (
    EncodedColumn,
    PerToken,
    Shared,
    appended,
    declared_specs,
    encode_fields,
    require_fields,
)
from dataplane.data.columns.row_source import InnerPart, RowSource
from dataplane.data.columns.values import FlatValues

__all__ = [
    "Column",
    "Empty",
    "EncodedColumn",
    "FlatValues",
    "InnerPart",
    "PerToken",
    "RowSource",
    "Shared",
    "StoredSubset",
    "SharedOffsets",
    "appended",
    "as_tensordict",
    "assemble",
    "checked",
    "declared_specs",
    "decode",
    "decode_batch",
    "decode_columns",
    "decode_on_device",
    "decode_padded",
    "decode_views",
    "encode_fields",
    "fresh",
    "require_fields",
    "from_pool",
    "use_on_current_stream",
    "widened",
]
