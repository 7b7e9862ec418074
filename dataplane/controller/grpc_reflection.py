"""The standard gRPC reflection service: lists the services of the gRPC server and their descriptors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from dataplane.controller.grpc_standard import CONTROL, HEALTH, POOL, REFLECTIONS, message_class

SERVICES = (CONTROL, HEALTH, *REFLECTIONS)


class Reflection:
    """Implements one of the services in `REFLECTIONS`."""

    def __init__(self, service: str) -> None:
        self.request = message_class(service, "ServerReflectionRequest")
        self._response_type: Any = message_class(service, "ServerReflectionResponse")

    async def info(self, requests: AsyncIterator[Any], context: object) -> AsyncIterator[Message]:
        """Answer each request of a ServerReflectionInfo stream."""
        async for request in requests:
            yield self._reply_to(request)

    def _reply_to(self, request: Any) -> Message:
        """Return the reply with the requested names or descriptors, or with an error."""
        answer = self._response_type(valid_host=request.host, original_request=request)
        what = request.WhichOneof("message_request")
        try:
            match what:
                case "list_services":
                    for name in SERVICES:
                        answer.list_services_response.service.add(name=name)
                case "file_by_filename":
                    _add_file(answer, POOL.FindFileByName(request.file_by_filename))
                case "file_containing_symbol":
                    _add_file(answer, POOL.FindFileContainingSymbol(request.file_containing_symbol))
                case "all_extension_numbers_of_type":  # no message of this service has extensions
                    message = POOL.FindMessageTypeByName(request.all_extension_numbers_of_type)
                    answer.all_extension_numbers_response.base_type_name = message.full_name
                case "file_containing_extension":
                    raise KeyError(f"{request.file_containing_extension.containing_type} has no extensions")
                case _:
                    _set_error(answer, grpc.StatusCode.INVALID_ARGUMENT, "the request lacks message_request")
        except KeyError as error:  # also the pool raises it, for an unknown name
            _set_error(answer, grpc.StatusCode.NOT_FOUND, str(error.args[0]))
        reply: Message = answer
        return reply


def _add_file(answer: Any, file: FileDescriptor) -> None:
    """Add the file and all its imports to the answer."""
    files = [file]
    for importer in files:  # also visits the files that the loop appends
        files += [imported for imported in importer.dependencies if imported not in files]
    answer.file_descriptor_response.file_descriptor_proto.extend(known.serialized_pb for known in files)


def _set_error(answer: Any, code: grpc.StatusCode, why: str) -> None:
    answer.error_response.error_code = code.value[0]
    answer.error_response.error_message = why
