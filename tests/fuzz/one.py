"""One target under atheris, which must see modules while they are imported: `python -m tests.fuzz.one TARGET ...`, with
libFuzzer's arguments after the name."""

from __future__ import annotations

import sys

import atheris

# What every input of a ledger goes through takes most of its time, and is of no interest but to one target.
_OFTEN = [] if "images" in sys.argv else ["dataplane.ledger.encoding.image"]

with atheris.instrument_imports(include=["dataplane", "workers"], exclude=_OFTEN):
    from tests.fuzz.targets import TARGETS


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer ends the process."""
    target = TARGETS[arguments[0]]
    atheris.Setup([sys.argv[0], *arguments[1:]], target.attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
