"""The standard health and reflection interfaces of gRPC, and the interface of this service, in a separate pool.

The default pool holds only one file per name, so generated code for these interfaces would fail in a process that also
imports `grpc_health` or `grpc_reflection`. Those packages support fewer protobuf versions than this one.
"""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from dataplane.protocol.pb import control_pb2

CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The same messages under two names: older clients support only the second."""

_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
}
Fields = dict[str, tuple[int, str]]
"""Number and type of each field of a message, "repeated TYPE" for a list; a name "ONEOF.FIELD" puts it in a oneof."""

_HEALTH: dict[str, Fields] = {"HealthCheckRequest": {"service": (1, "string")}, "HealthCheckResponse": {}}
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_REFLECTION: dict[str, Fields] = {
    "ServerReflectionRequest": {
        "host": (1, "string"),
        "message_request.file_by_filename": (3, "string"),
        "message_request.file_containing_symbol": (4, "string"),
        "message_request.file_containing_extension": (5, "ExtensionRequest"),
        "message_request.all_extension_numbers_of_type": (6, "string"),
        "message_request.list_services": (7, "string"),
    },
    "ExtensionRequest": {"containing_type": (1, "string"), "extension_number": (2, "int32")},
    "ServerReflectionResponse": {
        "valid_host": (1, "string"),
        "original_request": (2, "ServerReflectionRequest"),
        "message_response.file_descriptor_response": (4, "FileDescriptorResponse"),
        "message_response.all_extension_numbers_response": (5, "ExtensionNumberResponse"),
        "message_response.list_services_response": (6, "ListServiceResponse"),
        "message_response.error_response": (7, "ErrorResponse"),
    },
    "FileDescriptorResponse": {"file_descriptor_proto": (1, "repeated bytes")},
    "ExtensionNumberResponse": {"base_type_name": (1, "string"), "extension_number": (2, "repeated int32")},
    "ListServiceResponse": {"service": (1, "repeated ServiceResponse")},
    "ServiceResponse": {"name": (1, "string")},
    "ErrorResponse": {"error_code": (1, "int32"), "error_message": (2, "string")},
}


def _describe_file(package: str, name: str, messages: dict[str, Fields]) -> FileDescriptorProto:
    """Return the descriptor of a .proto file with these messages."""
    file = FileDescriptorProto(name=f"{package.replace('.', '/')}/{name}.proto", package=package, syntax="proto3")
    for message, members in messages.items():
        _add_fields(file.message_type.add(name=message), package, members)
    return file


def _add_fields(message: DescriptorProto, package: str, members: Fields) -> None:
    """Add `members` (see `Fields`) to the descriptor of a message. Types other than scalars are in `package`."""
    oneofs: list[str] = []
    for path, (number, kind) in members.items():
        oneof, _, name = path.rpartition(".")
        repeated, _, kind = kind.rpartition(" ")  # "repeated" or ""
        label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type = FieldDescriptorProto.TYPE_MESSAGE
            field.type_name = f".{package}.{kind}"
        if oneof:
            if oneof not in oneofs:
                oneofs.append(oneof)
                message.oneof_decl.add(name=oneof)
            field.oneof_index = oneofs.index(oneof)


def _describe_health(package: str) -> FileDescriptorProto:
    """Return the descriptor of the health service's .proto file."""
    file = _describe_file(package, "health", _HEALTH)
    response = file.message_type[1]  # HealthCheckResponse, whose enum `_describe_file` cannot express
    statuses = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(_STATUSES):
        statuses.value.add(name=name, number=number)
    optional = FieldDescriptorProto.LABEL_OPTIONAL
    of_enum = FieldDescriptorProto.TYPE_ENUM
    enum_name = f".{package}.{response.name}.{statuses.name}"
    response.field.add(name="status", number=1, label=optional, type=of_enum, type_name=enum_name)
    service = file.service.add(name="Health")
    request = f".{package}.HealthCheckRequest"
    reply = f".{package}.HealthCheckResponse"
    service.method.add(name="Check", input_type=request, output_type=reply)
    service.method.add(name="Watch", input_type=request, output_type=reply, server_streaming=True)
    return file


def _describe_reflection(package: str) -> FileDescriptorProto:
    """Return the descriptor of the reflection service's .proto file."""
    file = _describe_file(package, "reflection", _REFLECTION)
    file.service.add(name="ServerReflection").method.add(
        name="ServerReflectionInfo",
        input_type=f".{package}.ServerReflectionRequest",
        output_type=f".{package}.ServerReflectionResponse",
        client_streaming=True,
        server_streaming=True,
    )
    return file


def _create_pool() -> DescriptorPool:
    """Return a pool with the descriptors of all services of the gRPC server."""
    pool = DescriptorPool()
    pool.AddSerializedFile(control_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(_describe_health(_package_of(HEALTH)))
    for service in REFLECTIONS:
        pool.Add(_describe_reflection(_package_of(service)))
    return pool


def _package_of(service: str) -> str:
    return service.rpartition(".")[0]


POOL = _create_pool()
"""The descriptors that reflection serves."""


def message_class(service: str, name: str) -> type[Message]:
    """Return the class of message `name` in the package of `service`."""
    found: type[Message] = GetMessageClass(POOL.FindMessageTypeByName(f"{_package_of(service)}.{name}"))
    return found
