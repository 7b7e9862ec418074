"""Linters look at the image file and at every script in deploy/, and the image file names what is in this tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
BINARIES = Path(sys.executable).parent
SCRIPTS = sorted(
    path
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.read_bytes().startswith((b"#!/bin/sh", b"#!/usr/bin/env bash"))
)


def lint(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.integration
def test_the_image_file() -> None:
    lint([BINARIES / "hadolint", DOCKERFILE])


@pytest.mark.integration
def test_the_linter_of_image_files_refuses_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && sudo ls\n")
    with pytest.raises(AssertionError, match="DL3004"):
        lint([BINARIES / "hadolint", tmp_path / "Dockerfile"])


@pytest.mark.integration
@pytest.mark.parametrize("path", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_a_script(path: Path) -> None:
    lint([BINARIES / "shellcheck", path])


def test_there_are_scripts() -> None:
    assert [path.name for path in SCRIPTS] == ["tq.sbatch"]


def test_what_the_image_copies_is_let_through() -> None:
    """`.dockerignore` keeps everything out but what it names."""
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.M)
    names = {name for words in copied for name in words.split()}
    assert names == allowed
    assert all((ROOT / name).exists() for name in names)


def test_the_image_has_the_pinned_ray_and_torch() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    text = DOCKERFILE.read_text(encoding="utf-8")
    for name, package in (("ray", r'"ray\[default\]==([\d.]+)"'), ("torch", r"torch==([\d.]+)\n")):
        assert [f"{name}=={version}" for version in re.findall(package, text)] == [
            pin for pin in pins if pin.startswith(f"{name}==")
        ]


def test_nothing_is_pinned_twice() -> None:
    def pins(path: Path) -> dict[str, str]:
        found = (line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
        return {name.lower().replace("_", "-"): version for name, version in found}

    added = pins(DEPLOY / "docker" / "constraints.txt")
    assert "aiohttp-cors" in added
    assert not set(added) & set(pins(ROOT / "constraints.txt"))
