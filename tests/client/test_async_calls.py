"""The generated calls of the async client are what `make async-client` makes of `client.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "async_calls.py"


@pytest.mark.integration
def test_generating_again_changes_nothing() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["generated"](tool["CLIENT"].read_text()) == tool["CALLS"].read_text(), "run `make async-client`"
