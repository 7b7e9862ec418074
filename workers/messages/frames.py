"""A message of the wire as ZMQ frames: its head, and what follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

from workers.messages.wire import Data, PostMessage

_FRAMES: dict[type, int] = {PostMessage: 1, Data: 1}
"""How many follow the head of each; none, the others'."""

M = TypeVar("M")


def decoded(decode: Callable[[Any], M], frames: list[zmq.Frame]) -> M:
    """What the first frame says. `msgspec.DecodeError`: nothing of ours, or not with this number of frames after it."""
    said = decode(frames[0].buffer if frames else b"")
    if len(frames) - 1 != _FRAMES.get(type(said), 0):
        raise msgspec.DecodeError(f"{type(said).__name__} with {len(frames) - 1} frames")
    return said


def frame(body: Any) -> zmq.Frame:
    try:
        return zmq.Frame(body, copy=False, track=False)
    except OSError:
        # What is not copied takes pyzmq a descriptor or two, the first time.
        return zmq.Frame(body, copy=True)
