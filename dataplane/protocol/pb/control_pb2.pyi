from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("session", "call_id", "watermark", "confirmed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    session: int
    call_id: int
    watermark: int
    confirmed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., call_id: _Optional[int] = ..., watermark: _Optional[int] = ..., confirmed: _Optional[_Iterable[int]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("name", "facts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    facts: bytes
    def __init__(self, name: _Optional[str] = ..., facts: _Optional[bytes] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("nonce", "host", "name", "protocol_version", "session", "epoch", "lock_path")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    host: str
    name: str
    protocol_version: int
    session: int
    epoch: int
    lock_path: str
    def __init__(self, nonce: _Optional[str] = ..., host: _Optional[str] = ..., name: _Optional[str] = ..., protocol_version: _Optional[int] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., lock_path: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class DropUnitRequest(_message.Message):
    __slots__ = ("unit", "force")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    unit: int
    force: bool
    def __init__(self, unit: _Optional[int] = ..., force: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("opened", "endpoints", "host", "heartbeat_s", "put_timeout_s", "durable")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PUT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    host: str
    heartbeat_s: float
    put_timeout_s: float
    durable: bool
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., endpoints: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., put_timeout_s: _Optional[float] = ..., durable: bool = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("nonce", "session", "epoch", "units")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    session: int
    epoch: int
    units: _containers.RepeatedCompositeFieldContainer[UnitInfo]
    def __init__(self, nonce: _Optional[str] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitInfo, _Mapping]]] = ...) -> None: ...

class UnitInfo(_message.Message):
    __slots__ = ("unit", "name", "host", "epoch", "endpoints", "arena_path", "capacity_bytes", "curve_key")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    unit: int
    name: str
    host: str
    epoch: int
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    arena_path: str
    capacity_bytes: int
    curve_key: str
    def __init__(self, unit: _Optional[int] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., epoch: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., arena_path: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., curve_key: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("epoch", "min_heartbeat_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIN_HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    min_heartbeat_s: float
    def __init__(self, epoch: _Optional[int] = ..., min_heartbeat_s: _Optional[float] = ...) -> None: ...

class UnitDropped(_message.Message):
    __slots__ = ("unit",)
    UNIT_FIELD_NUMBER: _ClassVar[int]
    unit: int
    def __init__(self, unit: _Optional[int] = ...) -> None: ...

class ByeRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: Header
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnitsRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: Header
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ...) -> None: ...

class UnitList(_message.Message):
    __slots__ = ("units",)
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[UnitInfo]
    def __init__(self, units: _Optional[_Iterable[_Union[UnitInfo, _Mapping]]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("header", "partition", "fields", "num_samples", "tasks", "group_size", "enums", "strict", "budget_bytes", "when_full", "extend")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FieldSpec
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FieldSpec, _Mapping]] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENUMS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    fields: _containers.MessageMap[str, FieldSpec]
    num_samples: int
    tasks: _containers.RepeatedScalarFieldContainer[str]
    group_size: int
    enums: StringListMap
    strict: bool
    budget_bytes: int
    when_full: str
    extend: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., fields: _Optional[_Mapping[str, FieldSpec]] = ..., num_samples: _Optional[int] = ..., tasks: _Optional[_Iterable[str]] = ..., group_size: _Optional[int] = ..., enums: _Optional[_Union[StringListMap, _Mapping]] = ..., strict: bool = ..., budget_bytes: _Optional[int] = ..., when_full: _Optional[str] = ..., extend: bool = ...) -> None: ...

class FieldSpec(_message.Message):
    __slots__ = ("kind", "dtype", "inner")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    dtype: str
    inner: Int64List
    def __init__(self, kind: _Optional[str] = ..., dtype: _Optional[str] = ..., inner: _Optional[_Union[Int64List, _Mapping]] = ...) -> None: ...

class Int64List(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class StringList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class StringListMap(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: StringList
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[StringList, _Mapping]] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.MessageMap[str, StringList]
    def __init__(self, values: _Optional[_Mapping[str, StringList]] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("header", "partition")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("header", "partition")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ...) -> None: ...

class Described(_message.Message):
    __slots__ = ("partition", "fields", "strict", "tasks", "num_samples", "group_size", "sealed", "live", "undeclared", "open", "widened")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FieldSpec
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FieldSpec, _Mapping]] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    UNDECLARED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WIDENED_FIELD_NUMBER: _ClassVar[int]
    partition: str
    fields: _containers.MessageMap[str, FieldSpec]
    strict: bool
    tasks: _containers.RepeatedScalarFieldContainer[str]
    num_samples: int
    group_size: int
    sealed: bool
    live: int
    undeclared: _containers.RepeatedScalarFieldContainer[str]
    open: _containers.RepeatedScalarFieldContainer[str]
    widened: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, partition: _Optional[str] = ..., fields: _Optional[_Mapping[str, FieldSpec]] = ..., strict: bool = ..., tasks: _Optional[_Iterable[str]] = ..., num_samples: _Optional[int] = ..., group_size: _Optional[int] = ..., sealed: bool = ..., live: _Optional[int] = ..., undeclared: _Optional[_Iterable[str]] = ..., open: _Optional[_Iterable[str]] = ..., widened: _Optional[_Iterable[str]] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("header", "partition", "columns", "update", "unit_wish", "on_full", "timeout_s", "moving", "samples")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    UNIT_WISH_FIELD_NUMBER: _ClassVar[int]
    ON_FULL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    columns: _containers.RepeatedCompositeFieldContainer[ColumnSizes]
    update: bool
    unit_wish: int
    on_full: str
    timeout_s: float
    moving: bool
    samples: Samples
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[ColumnSizes, _Mapping]]] = ..., update: bool = ..., unit_wish: _Optional[int] = ..., on_full: _Optional[str] = ..., timeout_s: _Optional[float] = ..., moving: bool = ..., samples: _Optional[_Union[Samples, _Mapping]] = ...) -> None: ...

class ColumnSizes(_message.Message):
    __slots__ = ("name", "sizes", "by_schema")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    BY_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    name: str
    sizes: bytes
    by_schema: bool
    def __init__(self, name: _Optional[str] = ..., sizes: _Optional[bytes] = ..., by_schema: bool = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("ids", "rows", "generations")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ids: StringList
    rows: bytes
    generations: bytes
    def __init__(self, ids: _Optional[_Union[StringList, _Mapping]] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class Allocated(_message.Message):
    __slots__ = ("placements", "checksums", "evicted")
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    checksums: bool
    evicted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., checksums: bool = ..., evicted: _Optional[_Iterable[str]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("column", "first", "last", "unit", "offset")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    column: int
    first: int
    last: int
    unit: int
    offset: int
    def __init__(self, column: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., unit: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class PreallocateRequest(_message.Message):
    __slots__ = ("header", "unit", "nbytes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    unit: int
    nbytes: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., unit: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Preallocated(_message.Message):
    __slots__ = ("offset", "checksums")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    checksums: bool
    def __init__(self, offset: _Optional[int] = ..., checksums: bool = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("header", "reservation")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    reservation: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., reservation: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("header", "partition", "samples", "mode", "reservation", "offset", "columns", "tags", "located", "expected", "listed")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    samples: Samples
    mode: str
    reservation: int
    offset: int
    columns: _containers.RepeatedCompositeFieldContainer[CommitColumn]
    tags: _containers.RepeatedCompositeFieldContainer[TagColumn]
    located: int
    expected: _containers.RepeatedCompositeFieldContainer[FieldLocations]
    listed: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., mode: _Optional[str] = ..., reservation: _Optional[int] = ..., offset: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[CommitColumn, _Mapping]]] = ..., tags: _Optional[_Iterable[_Union[TagColumn, _Mapping]]] = ..., located: _Optional[int] = ..., expected: _Optional[_Iterable[_Union[FieldLocations, _Mapping]]] = ..., listed: bool = ...) -> None: ...

class CommitColumn(_message.Message):
    __slots__ = ("name", "spec", "lengths", "index", "checksums", "by_schema")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BY_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: FieldSpec
    lengths: bytes
    index: bytes
    checksums: bytes
    by_schema: bool
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[FieldSpec, _Mapping]] = ..., lengths: _Optional[bytes] = ..., index: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., by_schema: bool = ...) -> None: ...

class TagColumn(_message.Message):
    __slots__ = ("name", "values", "positions", "index")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedCompositeFieldContainer[Scalar]
    positions: bytes
    index: bytes
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[_Union[Scalar, _Mapping]]] = ..., positions: _Optional[bytes] = ..., index: _Optional[bytes] = ...) -> None: ...

class Scalar(_message.Message):
    __slots__ = ("string_value", "bool_value", "int64_value", "double_value")
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    string_value: str
    bool_value: bool
    int64_value: int
    double_value: float
    def __init__(self, string_value: _Optional[str] = ..., bool_value: bool = ..., int64_value: _Optional[int] = ..., double_value: _Optional[float] = ...) -> None: ...

class FieldLocations(_message.Message):
    __slots__ = ("name", "spec", "units", "offsets", "lengths", "checksums")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: FieldSpec
    units: bytes
    offsets: bytes
    lengths: bytes
    checksums: bytes
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[FieldSpec, _Mapping]] = ..., units: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("rows", "generations", "evicted", "born", "overwritten_bytes", "fields", "tags")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    BORN_FIELD_NUMBER: _ClassVar[int]
    OVERWRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    generations: bytes
    evicted: _containers.RepeatedScalarFieldContainer[str]
    born: int
    overwritten_bytes: int
    fields: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedCompositeFieldContainer[TagColumn]
    def __init__(self, rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., evicted: _Optional[_Iterable[str]] = ..., born: _Optional[int] = ..., overwritten_bytes: _Optional[int] = ..., fields: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[_Union[TagColumn, _Mapping]]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("header", "partition", "samples", "fields", "missing_ok", "brief")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_OK_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    samples: Samples
    fields: _containers.RepeatedScalarFieldContainer[str]
    missing_ok: bool
    brief: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., missing_ok: bool = ..., brief: bool = ...) -> None: ...

class Located(_message.Message):
    __slots__ = ("fields", "rows", "generations", "widened")
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    WIDENED_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[FieldLocations]
    rows: bytes
    generations: bytes
    widened: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fields: _Optional[_Iterable[_Union[FieldLocations, _Mapping]]] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., widened: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("header", "located")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    header: Header
    located: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., located: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("header", "partition", "task", "fields", "batch_size", "min_batch_size", "blocking", "timeout_s", "where", "group_by", "group_size", "order", "lease_s", "dp_rank", "dp_world", "step", "sampler", "max_lag", "version_tag", "partial_after_s", "partial", "samples", "peek")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_WORLD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    MAX_LAG_FIELD_NUMBER: _ClassVar[int]
    VERSION_TAG_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    task: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    batch_size: int
    min_batch_size: int
    blocking: bool
    timeout_s: float
    where: _containers.RepeatedCompositeFieldContainer[Predicate]
    group_by: str
    group_size: int
    order: str
    lease_s: float
    dp_rank: int
    dp_world: int
    step: int
    sampler: str
    max_lag: int
    version_tag: str
    partial_after_s: float
    partial: str
    samples: Samples
    peek: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., batch_size: _Optional[int] = ..., min_batch_size: _Optional[int] = ..., blocking: bool = ..., timeout_s: _Optional[float] = ..., where: _Optional[_Iterable[_Union[Predicate, _Mapping]]] = ..., group_by: _Optional[str] = ..., group_size: _Optional[int] = ..., order: _Optional[str] = ..., lease_s: _Optional[float] = ..., dp_rank: _Optional[int] = ..., dp_world: _Optional[int] = ..., step: _Optional[int] = ..., sampler: _Optional[str] = ..., max_lag: _Optional[int] = ..., version_tag: _Optional[str] = ..., partial_after_s: _Optional[float] = ..., partial: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., peek: bool = ...) -> None: ...

class Predicate(_message.Message):
    __slots__ = ("tag", "op", "value")
    TAG_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    tag: str
    op: str
    value: ScalarOrList
    def __init__(self, tag: _Optional[str] = ..., op: _Optional[str] = ..., value: _Optional[_Union[ScalarOrList, _Mapping]] = ...) -> None: ...

class ScalarList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Scalar]
    def __init__(self, values: _Optional[_Iterable[_Union[Scalar, _Mapping]]] = ...) -> None: ...

class ScalarOrList(_message.Message):
    __slots__ = ("string_value", "bool_value", "int64_value", "double_value", "list_value")
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    LIST_VALUE_FIELD_NUMBER: _ClassVar[int]
    string_value: str
    bool_value: bool
    int64_value: int
    double_value: float
    list_value: ScalarList
    def __init__(self, string_value: _Optional[str] = ..., bool_value: bool = ..., int64_value: _Optional[int] = ..., double_value: _Optional[float] = ..., list_value: _Optional[_Union[ScalarList, _Mapping]] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("ids", "rows", "generations", "fields", "tags", "dropped", "claim")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    rows: bytes
    generations: bytes
    fields: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedCompositeFieldContainer[TagColumn]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    claim: int
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., fields: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[_Union[TagColumn, _Mapping]]] = ..., dropped: _Optional[_Iterable[str]] = ..., claim: _Optional[int] = ...) -> None: ...

class UnclaimRequest(_message.Message):
    __slots__ = ("header", "claimed")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    header: Header
    claimed: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., claimed: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("header", "partition", "task", "samples", "claims")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    task: str
    samples: Samples
    claims: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., claims: _Optional[bytes] = ...) -> None: ...

class ClaimsSettled(_message.Message):
    __slots__ = ("cleared",)
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    cleared: bytes
    def __init__(self, cleared: _Optional[bytes] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("header", "partition", "task", "samples", "claims")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    task: str
    samples: Samples
    claims: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., claims: _Optional[bytes] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("header", "partition", "task", "samples", "lease_s", "claims")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    task: str
    samples: Samples
    lease_s: float
    claims: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., lease_s: _Optional[float] = ..., claims: _Optional[bytes] = ...) -> None: ...

class CheckConsumptionRequest(_message.Message):
    __slots__ = ("header", "partition", "tasks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ...) -> None: ...

class Consumption(_message.Message):
    __slots__ = ("consumed",)
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    consumed: bool
    def __init__(self, consumed: bool = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("header", "partition", "samples")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    samples: Samples
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ...) -> None: ...

class Cleared(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class SetTagsRequest(_message.Message):
    __slots__ = ("header", "partition", "samples", "tags")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    samples: Samples
    tags: _containers.RepeatedCompositeFieldContainer[TagColumn]
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., tags: _Optional[_Iterable[_Union[TagColumn, _Mapping]]] = ...) -> None: ...

class SetVersionRequest(_message.Message):
    __slots__ = ("header", "partition", "version")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    version: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("header", "partition", "samples", "limit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    samples: Samples
    limit: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class Listed(_message.Message):
    __slots__ = ("ids", "rows", "generations", "fields", "tags")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    rows: bytes
    generations: bytes
    fields: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedCompositeFieldContainer[TagColumn]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., fields: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[_Union[TagColumn, _Mapping]]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("header", "partitions", "limit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partitions: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partitions: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ...) -> None: ...

class StatsReport(_message.Message):
    __slots__ = ("epoch", "now", "units", "partitions", "sessions", "waiting_allocations", "low_watermark", "high_watermark", "partition_count")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    LOW_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    now: float
    units: _containers.RepeatedCompositeFieldContainer[UnitStats]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    waiting_allocations: int
    low_watermark: float
    high_watermark: float
    partition_count: int
    def __init__(self, epoch: _Optional[int] = ..., now: _Optional[float] = ..., units: _Optional[_Iterable[_Union[UnitStats, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[PartitionStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., waiting_allocations: _Optional[int] = ..., low_watermark: _Optional[float] = ..., high_watermark: _Optional[float] = ..., partition_count: _Optional[int] = ...) -> None: ...

class UnitStats(_message.Message):
    __slots__ = ("unit", "name", "host", "connected", "capacity_bytes", "unbacked_bytes", "free_bytes", "reserved_bytes", "live_bytes", "retired_bytes", "pinned_bytes", "used_bytes", "peak_used_bytes", "limit_bytes", "pressed", "problem", "extents", "fragments", "largest_free_bytes", "draining")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNBACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESSED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    unit: int
    name: str
    host: str
    connected: bool
    capacity_bytes: int
    unbacked_bytes: int
    free_bytes: int
    reserved_bytes: int
    live_bytes: int
    retired_bytes: int
    pinned_bytes: int
    used_bytes: int
    peak_used_bytes: int
    limit_bytes: int
    pressed: bool
    problem: str
    extents: int
    fragments: int
    largest_free_bytes: int
    draining: bool
    def __init__(self, unit: _Optional[int] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., connected: bool = ..., capacity_bytes: _Optional[int] = ..., unbacked_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., retired_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., peak_used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., pressed: bool = ..., problem: _Optional[str] = ..., extents: _Optional[int] = ..., fragments: _Optional[int] = ..., largest_free_bytes: _Optional[int] = ..., draining: bool = ...) -> None: ...

class PartitionStats(_message.Message):
    __slots__ = ("partition", "live", "born", "num_samples", "sealed", "live_bytes", "produced", "claimed", "waiting_claims", "version", "dropped", "used_bytes", "peak_used_bytes", "budget_bytes", "limit_bytes", "when_full", "evicted", "evicted_unconsumed", "waiting_puts", "pressed", "tasks")
    class ProducedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ClaimedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    BORN_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    WAITING_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_UNCONSUMED_FIELD_NUMBER: _ClassVar[int]
    WAITING_PUTS_FIELD_NUMBER: _ClassVar[int]
    PRESSED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    partition: str
    live: int
    born: int
    num_samples: int
    sealed: bool
    live_bytes: int
    produced: _containers.ScalarMap[str, int]
    claimed: _containers.ScalarMap[str, int]
    waiting_claims: int
    version: int
    dropped: int
    used_bytes: int
    peak_used_bytes: int
    budget_bytes: int
    limit_bytes: int
    when_full: str
    evicted: int
    evicted_unconsumed: int
    waiting_puts: int
    pressed: bool
    tasks: _containers.RepeatedCompositeFieldContainer[TaskStats]
    def __init__(self, partition: _Optional[str] = ..., live: _Optional[int] = ..., born: _Optional[int] = ..., num_samples: _Optional[int] = ..., sealed: bool = ..., live_bytes: _Optional[int] = ..., produced: _Optional[_Mapping[str, int]] = ..., claimed: _Optional[_Mapping[str, int]] = ..., waiting_claims: _Optional[int] = ..., version: _Optional[int] = ..., dropped: _Optional[int] = ..., used_bytes: _Optional[int] = ..., peak_used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., when_full: _Optional[str] = ..., evicted: _Optional[int] = ..., evicted_unconsumed: _Optional[int] = ..., waiting_puts: _Optional[int] = ..., pressed: bool = ..., tasks: _Optional[_Iterable[_Union[TaskStats, _Mapping]]] = ...) -> None: ...

class TaskStats(_message.Message):
    __slots__ = ("task", "fields", "ready", "leased", "held", "claimed", "waiting", "lag", "stalest_version")
    TASK_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    STALEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    task: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    ready: int
    leased: int
    held: int
    claimed: int
    waiting: int
    lag: int
    stalest_version: int
    def __init__(self, task: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., ready: _Optional[int] = ..., leased: _Optional[int] = ..., held: _Optional[int] = ..., claimed: _Optional[int] = ..., waiting: _Optional[int] = ..., lag: _Optional[int] = ..., stalest_version: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session", "name", "host", "state", "silent_s", "parked", "reservations", "pins")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    session: int
    name: str
    host: str
    state: str
    silent_s: float
    parked: int
    reservations: int
    pins: int
    def __init__(self, session: _Optional[int] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., state: _Optional[str] = ..., silent_s: _Optional[float] = ..., parked: _Optional[int] = ..., reservations: _Optional[int] = ..., pins: _Optional[int] = ...) -> None: ...

class WhyBlockedRequest(_message.Message):
    __slots__ = ("header", "partition", "task", "fields", "where", "group_by", "group_size", "max_lag", "version_tag")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LAG_FIELD_NUMBER: _ClassVar[int]
    VERSION_TAG_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    task: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    where: _containers.RepeatedCompositeFieldContainer[Predicate]
    group_by: str
    group_size: int
    max_lag: int
    version_tag: str
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., where: _Optional[_Iterable[_Union[Predicate, _Mapping]]] = ..., group_by: _Optional[str] = ..., group_size: _Optional[int] = ..., max_lag: _Optional[int] = ..., version_tag: _Optional[str] = ...) -> None: ...

class Blocked(_message.Message):
    __slots__ = ("unclaimed", "ready", "matching", "claimed", "leased", "held", "lacking", "undeclared", "unproduced", "filtered", "groups", "partial_groups", "partial", "dropped", "born", "expected", "complete", "version", "writers", "waiting_puts", "waiting_puts_s", "waiting_writers", "why")
    class LackingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FilteredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PartialEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UNCLAIMED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    MATCHING_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    UNDECLARED_FIELD_NUMBER: _ClassVar[int]
    UNPRODUCED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    BORN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PUTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PUTS_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_WRITERS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    unclaimed: int
    ready: int
    matching: int
    claimed: int
    leased: int
    held: int
    lacking: _containers.ScalarMap[str, int]
    undeclared: _containers.RepeatedScalarFieldContainer[str]
    unproduced: _containers.RepeatedScalarFieldContainer[str]
    filtered: _containers.ScalarMap[str, int]
    groups: int
    partial_groups: int
    partial: _containers.ScalarMap[str, int]
    dropped: int
    born: int
    expected: int
    complete: bool
    version: int
    writers: _containers.RepeatedCompositeFieldContainer[Writer]
    waiting_puts: int
    waiting_puts_s: float
    waiting_writers: _containers.RepeatedScalarFieldContainer[str]
    why: str
    def __init__(self, unclaimed: _Optional[int] = ..., ready: _Optional[int] = ..., matching: _Optional[int] = ..., claimed: _Optional[int] = ..., leased: _Optional[int] = ..., held: _Optional[int] = ..., lacking: _Optional[_Mapping[str, int]] = ..., undeclared: _Optional[_Iterable[str]] = ..., unproduced: _Optional[_Iterable[str]] = ..., filtered: _Optional[_Mapping[str, int]] = ..., groups: _Optional[int] = ..., partial_groups: _Optional[int] = ..., partial: _Optional[_Mapping[str, int]] = ..., dropped: _Optional[int] = ..., born: _Optional[int] = ..., expected: _Optional[int] = ..., complete: bool = ..., version: _Optional[int] = ..., writers: _Optional[_Iterable[_Union[Writer, _Mapping]]] = ..., waiting_puts: _Optional[int] = ..., waiting_puts_s: _Optional[float] = ..., waiting_writers: _Optional[_Iterable[str]] = ..., why: _Optional[str] = ...) -> None: ...

class Writer(_message.Message):
    __slots__ = ("session", "name", "ago_s", "live", "fields")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    name: str
    ago_s: float
    live: bool
    fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[int] = ..., name: _Optional[str] = ..., ago_s: _Optional[float] = ..., live: bool = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("header", "partitions")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partitions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partitions: _Optional[_Iterable[str]] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[SavedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[SavedPartition, _Mapping]]] = ...) -> None: ...

class SavedPartition(_message.Message):
    __slots__ = ("partition", "live", "born", "fields", "tasks", "num_samples", "group_size", "enums", "strict", "sealed", "version", "budget_bytes", "when_full")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    BORN_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENUMS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    partition: str
    live: int
    born: int
    fields: _containers.RepeatedCompositeFieldContainer[SavedField]
    tasks: _containers.RepeatedCompositeFieldContainer[SavedTask]
    num_samples: int
    group_size: int
    enums: StringListMap
    strict: bool
    sealed: bool
    version: int
    budget_bytes: int
    when_full: str
    def __init__(self, partition: _Optional[str] = ..., live: _Optional[int] = ..., born: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[SavedField, _Mapping]]] = ..., tasks: _Optional[_Iterable[_Union[SavedTask, _Mapping]]] = ..., num_samples: _Optional[int] = ..., group_size: _Optional[int] = ..., enums: _Optional[_Union[StringListMap, _Mapping]] = ..., strict: bool = ..., sealed: bool = ..., version: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., when_full: _Optional[str] = ...) -> None: ...

class SavedField(_message.Message):
    __slots__ = ("name", "declared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    declared: FieldSpec
    def __init__(self, name: _Optional[str] = ..., declared: _Optional[_Union[FieldSpec, _Mapping]] = ...) -> None: ...

class SavedTask(_message.Message):
    __slots__ = ("name", "claimed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    name: str
    claimed: bytes
    def __init__(self, name: _Optional[str] = ..., claimed: _Optional[bytes] = ...) -> None: ...

class ReadSavedRequest(_message.Message):
    __slots__ = ("header", "saved", "partition", "first", "last", "fields", "names")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    saved: int
    partition: str
    first: int
    last: int
    fields: _containers.RepeatedScalarFieldContainer[str]
    names: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., saved: _Optional[int] = ..., partition: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., fields: _Optional[_Iterable[str]] = ..., names: bool = ...) -> None: ...

class SavedRows(_message.Message):
    __slots__ = ("ids", "tags", "fields")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedCompositeFieldContainer[TagColumn]
    fields: _containers.RepeatedCompositeFieldContainer[FieldLocations]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[_Union[TagColumn, _Mapping]]] = ..., fields: _Optional[_Iterable[_Union[FieldLocations, _Mapping]]] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("header", "partition")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("header", "staged", "partitions", "replace")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    header: Header
    staged: _containers.RepeatedScalarFieldContainer[str]
    partitions: _containers.RepeatedCompositeFieldContainer[SavedPartition]
    replace: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., staged: _Optional[_Iterable[str]] = ..., partitions: _Optional[_Iterable[_Union[SavedPartition, _Mapping]]] = ..., replace: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("header", "unit", "undo", "force")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    header: Header
    unit: int
    undo: bool
    force: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., unit: _Optional[int] = ..., undo: bool = ..., force: bool = ...) -> None: ...

class FindCellsRequest(_message.Message):
    __slots__ = ("header", "unit", "max_cells", "max_bytes", "partition", "field", "timeout_s")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MAX_CELLS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    header: Header
    unit: int
    max_cells: int
    max_bytes: int
    partition: str
    field: str
    timeout_s: float
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., unit: _Optional[int] = ..., max_cells: _Optional[int] = ..., max_bytes: _Optional[int] = ..., partition: _Optional[str] = ..., field: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class FoundCells(_message.Message):
    __slots__ = ("partition", "field", "spec", "rows", "generations", "index", "offsets", "lengths", "checksums", "cells", "live", "reserved", "reserved_bytes", "pinned_bytes", "holders")
    class LiveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    partition: str
    field: str
    spec: FieldSpec
    rows: bytes
    generations: bytes
    index: bytes
    offsets: bytes
    lengths: bytes
    checksums: bytes
    cells: int
    live: _containers.ScalarMap[str, int]
    reserved: int
    reserved_bytes: int
    pinned_bytes: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, partition: _Optional[str] = ..., field: _Optional[str] = ..., spec: _Optional[_Union[FieldSpec, _Mapping]] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., index: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., cells: _Optional[int] = ..., live: _Optional[_Mapping[str, int]] = ..., reserved: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("header", "partition", "field", "unit", "rows", "generations", "index", "offsets", "lengths", "located", "reservation")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    field: str
    unit: int
    rows: bytes
    generations: bytes
    index: bytes
    offsets: bytes
    lengths: bytes
    located: int
    reservation: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., field: _Optional[str] = ..., unit: _Optional[int] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., index: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., located: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("cells", "skipped")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    cells: int
    skipped: int
    def __init__(self, cells: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("header", "unit", "force")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    header: Header
    unit: int
    force: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., unit: _Optional[int] = ..., force: bool = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("header", "partition", "columns")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    columns: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., columns: _Optional[int] = ...) -> None: ...

class Matrix(_message.Message):
    __slots__ = ("partition", "live", "first_generation", "last_generation", "samples", "examined", "produced", "tasks")
    class ProducedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    FIRST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    partition: str
    live: int
    first_generation: int
    last_generation: int
    samples: bytes
    examined: bytes
    produced: _containers.ScalarMap[str, bytes]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskMatrix]
    def __init__(self, partition: _Optional[str] = ..., live: _Optional[int] = ..., first_generation: _Optional[int] = ..., last_generation: _Optional[int] = ..., samples: _Optional[bytes] = ..., examined: _Optional[bytes] = ..., produced: _Optional[_Mapping[str, bytes]] = ..., tasks: _Optional[_Iterable[_Union[TaskMatrix, _Mapping]]] = ...) -> None: ...

class TaskMatrix(_message.Message):
    __slots__ = ("task", "claimed", "leased")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    task: str
    claimed: bytes
    leased: bytes
    def __init__(self, task: _Optional[str] = ..., claimed: _Optional[bytes] = ..., leased: _Optional[bytes] = ...) -> None: ...

class ShowRequest(_message.Message):
    __slots__ = ("header", "partition", "samples")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    samples: Samples
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ...) -> None: ...

class Shown(_message.Message):
    __slots__ = ("partition", "sample", "row", "generation", "since", "now", "cells", "missing", "tags", "tasks")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Scalar
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Scalar, _Mapping]] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    partition: str
    sample: str
    row: int
    generation: int
    since: float
    now: float
    cells: _containers.RepeatedCompositeFieldContainer[ShownCell]
    missing: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.MessageMap[str, Scalar]
    tasks: _containers.RepeatedCompositeFieldContainer[ShownTask]
    def __init__(self, partition: _Optional[str] = ..., sample: _Optional[str] = ..., row: _Optional[int] = ..., generation: _Optional[int] = ..., since: _Optional[float] = ..., now: _Optional[float] = ..., cells: _Optional[_Iterable[_Union[ShownCell, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ..., tags: _Optional[_Mapping[str, Scalar]] = ..., tasks: _Optional[_Iterable[_Union[ShownTask, _Mapping]]] = ...) -> None: ...

class ShownCell(_message.Message):
    __slots__ = ("field", "spec", "unit", "offset", "length", "size_bytes", "pinned", "shared")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    field: str
    spec: FieldSpec
    unit: int
    offset: int
    length: int
    size_bytes: int
    pinned: bool
    shared: bool
    def __init__(self, field: _Optional[str] = ..., spec: _Optional[_Union[FieldSpec, _Mapping]] = ..., unit: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., size_bytes: _Optional[int] = ..., pinned: bool = ..., shared: bool = ...) -> None: ...

class ShownTask(_message.Message):
    __slots__ = ("task", "state", "lacking", "client", "until")
    TASK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    task: str
    state: str
    lacking: _containers.RepeatedScalarFieldContainer[str]
    client: str
    until: float
    def __init__(self, task: _Optional[str] = ..., state: _Optional[str] = ..., lacking: _Optional[_Iterable[str]] = ..., client: _Optional[str] = ..., until: _Optional[float] = ...) -> None: ...

class MapMemoryRequest(_message.Message):
    __slots__ = ("header", "unit", "cells")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    unit: int
    cells: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., unit: _Optional[int] = ..., cells: _Optional[int] = ...) -> None: ...

class MemoryMap(_message.Message):
    __slots__ = ("unit", "capacity_bytes", "backed_bytes", "cell_bytes", "live", "reserved", "retired", "pinned", "free_bytes", "largest_free_bytes", "fragments", "extents")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CELL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    unit: int
    capacity_bytes: int
    backed_bytes: int
    cell_bytes: int
    live: bytes
    reserved: bytes
    retired: bytes
    pinned: bytes
    free_bytes: int
    largest_free_bytes: int
    fragments: int
    extents: int
    def __init__(self, unit: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., backed_bytes: _Optional[int] = ..., cell_bytes: _Optional[int] = ..., live: _Optional[bytes] = ..., reserved: _Optional[bytes] = ..., retired: _Optional[bytes] = ..., pinned: _Optional[bytes] = ..., free_bytes: _Optional[int] = ..., largest_free_bytes: _Optional[int] = ..., fragments: _Optional[int] = ..., extents: _Optional[int] = ...) -> None: ...

class WaitsRequest(_message.Message):
    __slots__ = ("header", "partition", "task", "limit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    partition: str
    task: str
    limit: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class WaitList(_message.Message):
    __slots__ = ("now", "waits", "total")
    NOW_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    now: float
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    total: int
    def __init__(self, now: _Optional[float] = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("session", "client", "what", "partition", "task", "fields", "wanted", "ready", "since", "until")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    session: int
    client: str
    what: str
    partition: str
    task: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    wanted: int
    ready: int
    since: float
    until: float
    def __init__(self, session: _Optional[int] = ..., client: _Optional[str] = ..., what: _Optional[str] = ..., partition: _Optional[str] = ..., task: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., wanted: _Optional[int] = ..., ready: _Optional[int] = ..., since: _Optional[float] = ..., until: _Optional[float] = ...) -> None: ...
