"""Checks of the arguments that callers pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataplane.core.arguments import whole_number
from dataplane.errors import InvalidRequestError


@pytest.mark.parametrize("value", [2, np.int64(2), torch.tensor(2)])
def test_a_whole_number_of_any_type_is_an_int(value: Any) -> None:
    assert whole_number("batch_size", value, 1) == 2
    assert type(whole_number("batch_size", value, 1)) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True, float("nan"), [2], object()])
def test_what_is_no_whole_number_or_too_small_is_refused_with_its_name(value: Any) -> None:
    expected = r"^batch_size=.+: expected an integer of 1 or more$"
    with pytest.raises(InvalidRequestError, match=expected):
        whole_number("batch_size", value, 1)
