from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BulkRequest(_message.Message):
    __slots__ = ("protocol_version", "session", "epoch", "call", "attach", "proof", "write", "read", "stop", "settle")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    session: int
    epoch: int
    call: int
    attach: Attach
    proof: AttachProof
    write: WriteRanges
    read: ReadRanges
    stop: StopPut
    settle: Settle
    def __init__(self, protocol_version: _Optional[int] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., call: _Optional[int] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., proof: _Optional[_Union[AttachProof, _Mapping]] = ..., write: _Optional[_Union[WriteRanges, _Mapping]] = ..., read: _Optional[_Union[ReadRanges, _Mapping]] = ..., stop: _Optional[_Union[StopPut, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ...) -> None: ...

class BulkReply(_message.Message):
    __slots__ = ("call", "error", "challenge", "attached", "written", "bytes", "stopped", "not_fetched", "settled")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    NOT_FETCHED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    call: int
    error: BulkError
    challenge: Challenge
    attached: Attached
    written: Written
    bytes: ReadBytes
    stopped: Stopped
    not_fetched: NotFetched
    settled: Settled
    def __init__(self, call: _Optional[int] = ..., error: _Optional[_Union[BulkError, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., written: _Optional[_Union[Written, _Mapping]] = ..., bytes: _Optional[_Union[ReadBytes, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ..., not_fetched: _Optional[_Union[NotFetched, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("engine", "address", "size", "tag")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    engine: str
    address: int
    size: int
    tag: bytes
    def __init__(self, engine: _Optional[str] = ..., address: _Optional[int] = ..., size: _Optional[int] = ..., tag: _Optional[bytes] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("lock_path", "boot_id")
    LOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    lock_path: str
    boot_id: str
    def __init__(self, lock_path: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("local", "arena_path", "cookie", "offset", "length", "why", "engine")
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    COOKIE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    local: bool
    arena_path: str
    cookie: bytes
    offset: int
    length: int
    why: str
    engine: Memory
    def __init__(self, local: bool = ..., arena_path: _Optional[str] = ..., cookie: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., why: _Optional[str] = ..., engine: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class AttachProof(_message.Message):
    __slots__ = ("seen",)
    SEEN_FIELD_NUMBER: _ClassVar[int]
    seen: bytes
    def __init__(self, seen: _Optional[bytes] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteRanges(_message.Message):
    __slots__ = ("offsets", "sizes", "frame_ranges", "reservation", "source")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    FRAME_RANGES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    frame_ranges: _containers.RepeatedScalarFieldContainer[int]
    reservation: int
    source: Memory
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., frame_ranges: _Optional[_Iterable[int]] = ..., reservation: _Optional[int] = ..., source: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class NotFetched(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class StopPut(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    def __init__(self, reservation: _Optional[int] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRanges(_message.Message):
    __slots__ = ("offsets", "sizes", "fetch", "inner")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    fetch: bool
    inner: InnerSlice
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., fetch: bool = ..., inner: _Optional[_Union[InnerSlice, _Mapping]] = ...) -> None: ...

class InnerSlice(_message.Message):
    __slots__ = ("unit_bytes", "counts", "strides", "run")
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    unit_bytes: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    run: int
    def __init__(self, unit_bytes: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., run: _Optional[int] = ...) -> None: ...

class ReadBytes(_message.Message):
    __slots__ = ("size", "source")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    size: int
    source: Memory
    def __init__(self, size: _Optional[int] = ..., source: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: bytes
    def __init__(self, tag: _Optional[bytes] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BulkError(_message.Message):
    __slots__ = ("name", "facts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    facts: bytes
    def __init__(self, name: _Optional[str] = ..., facts: _Optional[bytes] = ...) -> None: ...
