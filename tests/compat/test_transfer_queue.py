"""Scripts that use the TransferQueue package's interface see the same of the package (0.1.11, with its SimpleStorage
in Ray actors) and of `dataplane.compat.transfer_queue`.

Where the two are meant to differ, tests of this project's alone say so (`test_transfer_queue_own.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.conftest import SCRIPTS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_sees_the_same_of_both(script: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    original, ours = both
    assert "failed" not in original[script], original[script]["failed"]
    assert "failed" not in ours[script], ours[script]["failed"]
    assert ours[script] == original[script]
