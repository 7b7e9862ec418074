"""A directory of workers, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workers.directory import Directory, DirectoryClient


@pytest.fixture
def directory() -> Iterator[Directory]:
    with Directory.serve() as served:
        yield served


@pytest.fixture
def client(directory: Directory) -> Iterator[DirectoryClient]:
    with DirectoryClient(directory.address) as made:
        yield made
