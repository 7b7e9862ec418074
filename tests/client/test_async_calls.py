"""The generated calls of the async client are what `make async-client` makes of `client.py`."""

from __future__ import annotations

import pytest

from tests.client.async_calls import CALLS, CLIENT, generated


@pytest.mark.integration
def test_generating_again_changes_nothing() -> None:
    assert generated(CLIENT.read_text()) == CALLS.read_text(), "run `make async-client`"
