"""A process that may open no more files."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def exhausted(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: type[Exception] = OSError
) -> Iterator[None]:
    """Meanwhile `owner.name`, which opens one, finds none left: an `error` of the system's or of ZMQ's says so."""

    def none_left(*_: object, **__: object) -> Any:
        raise error(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, none_left)
        yield
