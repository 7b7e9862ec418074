"""The oldest versions that `pyproject.toml` allows, as constraints for pip: `make test-floors` makes its environment of
exactly these. What they depend on in turn is pip's choice; the tools of the tests are those of `constraints.txt`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("coverage", "hypothesis", "omegaconf", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "TransferQueue")
"""What the tests of the floors use besides."""


def floors() -> dict[str, str]:
    """The oldest version by name of requirement."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {}
    for requirement in project["dependencies"]:
        floor = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,[<!=.*\d,]+)?", requirement)
        if floor is None:
            raise ValueError(f"{requirement!r} in pyproject.toml has no floor of the form NAME>=VERSION")
        found[floor[1]] = floor[2]
    return found


def tools() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {name: pinned[name] for name in TOOLS}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in {**floors(), **tools()}.items()))
