""""""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.core import helpers as helpers_module
from dataplane.core.row_copy import Run, copy_runs
from dataplane.data import jagged
from dataplane.data.columns import parallel_copy
from dataplane.data.columns.parallel_copy import FROM_BYTES, Copier, default_threads
from dataplane.data.jagged import (
    _pad_by_mask,
    as_lengths,
    detached_values,
    is_jagged,
    jagged_from_values,
    maybe_pack_jagged,
    not_per_token,
    pack_jagged_fields,
    pad_element,
    pad_nested,
    pad_scalar,
    response_from_nested,
    row_lengths,
    row_starts,
    select_rows,
    to_nested_by_length,
    view_jagged_fields,
)
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import InvalidRequestError
from tests.data.columns_helpers import nested_of, random_tensor, same_bits, same_rows

LENGTHS = [3, 0, 5, 1]
with_holes = jagged_from_values(torch.arange(12.0), torch.tensor([0, 4, 8, 12]), lengths=torch.tensor([3, 0, 4]))


@pytest.mark.parametrize("constructor", [True, False])
def test_jagged_tensors_are_torchs_own_however_they_are_made(
    monkeypatch: pytest.MonkeyPatch, constructor: bool
) -> None:
    assert jagged._constructor_matches(), "the constructor of the torch that is pinned is used"
    monkeypatch.setattr(jagged, "_constructor_matches", lambda: constructor)
    values, offsets = torch.arange(6.0), torch.tensor([0, 2, 2, 6])
    nested = jagged_from_values(values, offsets, span=(0, 4))
    other = jagged_from_values(torch.arange(6), offsets, span=(0, 4))
    assert is_jagged(nested)
    assert nested._is_view() is not constructor
    assert nested.offsets() is offsets
    assert nested.values().data_ptr() == values.data_ptr()
    assert torch.equal((nested + other).values(), 2 * values)
    assert (nested._get_min_seqlen(), nested._get_max_seqlen()) == (0, 4)
    assert same_rows(nested, [values[:2], values[2:2], values[2:]])
    assert torch.nested.to_padded_tensor(nested, -1.0).tolist() == [[0, 1, -1, -1], [-1] * 4, [2, 3, 4, 5]]
    assert same_rows(pickle.loads(pickle.dumps(nested)), list(nested.unbind()))
    wants = torch.arange(6.0, requires_grad=True)
    (jagged_from_values(wants, offsets, span=(0, 4)) * 3).values().sum().backward()
    assert wants.grad is not None
    assert wants.grad.tolist() == [3] * 6
    leaf = jagged_from_values(values.clone(), offsets, span=(0, 4)).requires_grad_()
    (leaf * 2).values().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.values().tolist() == [2] * 6


def test_a_constructor_that_makes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> torch.Tensor:
        raise TypeError("unexpected keyword argument '_metadata_cache'")

    for makes in (refuses, lambda values, offsets, span: nested_of([values])):
        monkeypatch.setattr(jagged, "_construct", makes)
        assert not jagged._constructor_matches.__wrapped__()


def test_is_jagged() -> None:
    nested = nested_of([torch.zeros(1, 2), torch.zeros(3, 2)])
    assert is_jagged(nested)
    assert is_jagged(with_holes)
    assert not is_jagged(nested.transpose(1, 2))
    assert not is_jagged(torch.zeros(2))
    assert not is_jagged("x")


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
@pytest.mark.parametrize("inner", [(), (2,)])
def test_to_nested_by_length(dtype: torch.dtype, inner: tuple[int, ...]) -> None:
    padded = random_tensor((4, 6, *inner), dtype)
    nested = to_nested_by_length(padded, torch.tensor(LENGTHS))
    assert is_jagged(nested)
    assert same_rows(nested, [padded[i, :length] for i, length in enumerate(LENGTHS)])
    assert row_lengths(nested).tolist() == LENGTHS


def test_gradients_flow_through_packing_and_response() -> None:
    padded = torch.ones(2, 4, requires_grad=True)
    nested = to_nested_by_length(padded, [4, 3])
    response = response_from_nested(nested, to_nested_by_length(torch.ones(2, 4), [2, 1]))
    response.values().sum().backward()
    assert padded.grad is not None
    assert padded.grad.tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("padded", "lengths", "told"),
    [
        (torch.zeros(2, 3), [1], "got 1 lengths for 2 rows"),
        (torch.zeros(2, 3), [1, 4], "width 3, but the longest sample has 4"),
        (torch.zeros(2, 3), [1, -1], "negative"),
        (torch.zeros(2, 3), [1.0, 2.0], "integers"),
        (torch.zeros(2, 3), [[1], [2]], "one-dimensional"),
        (torch.zeros(2), [1, 1], "padded tensor"),
        (with_holes, [1, 1, 1], "nested"),
    ],
)
def test_lengths_that_do_not_fit(padded: Any, lengths: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        to_nested_by_length(padded, lengths)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("lengths", [LENGTHS, np.array(LENGTHS, dtype=np.int32), torch.tensor(LENGTHS)], ids=type)
def test_lengths_of_any_kind(lengths: Any) -> None:
    assert as_lengths(lengths, rows=4).tolist() == LENGTHS
    assert as_lengths(lengths).dtype == torch.int64


# --- packing fields -----------------------------------------------------------------------------------------------

BATCH: dict[str, Any] = {
    "input_ids": torch.arange(24).reshape(4, 6),
    "advantages": torch.arange(32.0).reshape(4, 8),
    "returns": torch.arange(4.0),
    "pixel_values": torch.zeros(4, 6),
    "token_mask": nested_of([torch.ones(length) for length in LENGTHS]),
    "values": np.arange(24.0).reshape(4, 6),
    "text": ["a", "b", "c", "d"],
}


@pytest.mark.parametrize("pack", [pack_jagged_fields, maybe_pack_jagged, view_jagged_fields])
def test_declared_fields_are_cut_to_the_lengths_and_no_others(pack: Any) -> None:
    packed = pack(BATCH, lengths=LENGTHS)
    assert list(packed) == list(BATCH)
    for name in ("input_ids", "advantages", "values"):
        rows = torch.as_tensor(BATCH[name])
        assert is_jagged(packed[name])
        assert same_rows(packed[name], [rows[i, :length] for i, length in enumerate(LENGTHS)])
    for name in ("returns", "pixel_values", "token_mask", "text"):
        assert packed[name] is BATCH[name], "undeclared, one-dimensional, or jagged already"


def test_packed_fields_can_be_combined() -> None:
    packed = pack_jagged_fields(BATCH, lengths=LENGTHS)
    total = packed["input_ids"] + packed["advantages"]
    assert same_rows(total, [BATCH["input_ids"][i, :n] + BATCH["advantages"][i, :n] for i, n in enumerate(LENGTHS)])


def test_names_are_declared_by_the_caller() -> None:
    packed = pack_jagged_fields(BATCH, lengths=LENGTHS, token_aligned_fields={"pixel_values"})
    assert is_jagged(packed["pixel_values"])
    assert packed["input_ids"] is BATCH["input_ids"]


def test_narrower_than_the_longest_row_names_the_field() -> None:
    with pytest.raises(ValueError, match="'input_ids': rows have width 6, but the longest sample has 7"):
        pack_jagged_fields(BATCH, lengths=[7, 1, 1, 1])


def test_nothing_to_pack_by() -> None:
    assert maybe_pack_jagged(BATCH) == BATCH


def test_views_share_memory_whatever_the_strides() -> None:
    base = torch.arange(48).reshape(4, 12)
    for padded in (base, base[:, 2:], base[:, :5], base[:, ::2], base[::2].repeat_interleave(2, 0)):
        viewed = view_jagged_fields({"input_ids": padded}, lengths=LENGTHS)["input_ids"]
        assert same_rows(viewed, [padded[i, :length] for i, length in enumerate(LENGTHS)])
        assert viewed.values().untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()
    for padded in (base[:1].expand(4, 12), base.reshape(12, 4).t()[:, :6], base[:, :0]):
        lengths = [min(length, padded.shape[1]) for length in LENGTHS]
        viewed = view_jagged_fields({"input_ids": padded}, lengths=lengths)["input_ids"]
        assert same_rows(viewed, [padded[i, :length] for i, length in enumerate(lengths)])


# --- padding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_pad_nested(dtype: torch.dtype) -> None:
    padded = random_tensor((4, 5, 2), dtype)
    back = pad_nested(to_nested_by_length(padded, LENGTHS), 1, width=7)
    assert back.shape == (4, 7, 2)
    one = torch.ones(1).to(dtype)
    for i, length in enumerate(LENGTHS):
        assert same_bits(back[i, :length], padded[i, :length])
        assert same_bits(back[i, length:].contiguous(), one.expand(7 - length, 2).contiguous())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_the_code_path_of_accelerators_gives_the_same(dtype: torch.dtype) -> None:
    nested = to_nested_by_length(random_tensor((4, 5, 2), dtype), LENGTHS)
    values, starts, lengths = detached_values(nested), row_starts(nested), row_lengths(nested)
    assert same_bits(_pad_by_mask(values, starts, lengths, 7, 1), pad_nested(nested, 1, width=7))


def test_pad_nested_with_holes_and_width() -> None:
    assert pad_nested(with_holes, -1).tolist() == [[0, 1, 2, -1], [-1] * 4, [8, 9, 10, 11]]
    with pytest.raises(ValueError, match="cannot pad to length 3: the longest row has 4"):
        pad_nested(with_holes, width=3)
    with pytest.raises(ValueError, match="cannot pad to length -1"):
        pad_nested(jagged_from_values(torch.zeros(0), torch.tensor([0])), width=-1)
    assert pad_nested(jagged_from_values(torch.zeros(0), torch.tensor([0]))).shape == (0, 0)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_pad_element_is_the_bits_of_the_number(dtype: torch.dtype) -> None:
    element = pad_element(True, dtype)
    assert element.shape == ()
    assert not element.flags.writeable, "it is given out again"
    bits = torch.from_numpy(np.frombuffer(element.tobytes(), dtype=np.uint8).copy())
    assert same_bits(bits.view(dtype), torch.ones(1).to(dtype))


def test_pad_elements_that_are_equal_but_differ_in_bits() -> None:
    bits = [pad_element(value, torch.float32).tobytes().hex() for value in (0.0, -0.0, 0, float("nan"), 0.0)]
    assert bits == ["00000000", "00000080", "00000000", "0000c07f", "00000000"]


BEYOND = (10**400, -(10**400))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[(dtype, value) for dtype in TORCH_DTYPES.values() for value in BEYOND],
        (torch.float32, 1e39),
        (torch.bfloat16, -1e39),
        (torch.float16, 65520.0),
        (torch.float8_e5m2, 1e6),
        (torch.float8_e4m3fn, 1e4),
        (torch.float8_e4m3fn, math.inf),
        (torch.complex64, 1e39),
        (torch.complex64, complex(0, 1e39)),
        (torch.float32, 1j),
        (torch.int64, math.nan),
        (torch.int64, math.inf),
    ],
    ids=str,
)
def test_a_pad_value_that_would_become_another_is_refused(dtype: torch.dtype, value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be represented"):
        pad_scalar(value, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pad_values_that_are_rounded_infinite_or_no_number_are_taken(dtype: torch.dtype) -> None:
    assert pad_scalar(0.1, dtype) == 0.1
    assert pad_scalar(-math.inf, dtype) == -math.inf
    assert math.isnan(pad_scalar(math.nan, dtype).real)
    assert pad_scalar(torch.finfo(dtype).max, dtype) == torch.finfo(dtype).max


def test_select_rows() -> None:
    rows = list(with_holes.unbind())
    assert same_rows(select_rows(with_holes, torch.tensor([2, 1, 2])), [rows[2], rows[1], rows[2]])
    assert same_rows(select_rows(with_holes, torch.zeros(0, dtype=torch.int64)), [])


# --- response -----------------------------------------------------------------------------------------------------


def test_response_is_the_response_slice_shifted_left_by_one() -> None:
    # prompts of 2, 3 and 1 tokens, responses of 2, 0 and 3; element t of a row is named row * 10 + t
    full = nested_of([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12]), torch.tensor([20, 21, 22, 23])])
    mask = nested_of([torch.ones(2), torch.ones(0), torch.ones(3)])
    response = response_from_nested(full, mask)
    assert [row.tolist() for row in response.unbind()] == [[1, 2], [], [20, 21, 22]]
    assert [row.tolist() for row in (response * mask).unbind()] == [[1, 2], [], [20, 21, 22]]


def test_response_of_tensors_with_holes_and_inner_dimensions() -> None:
    values = torch.arange(24).reshape(12, 2)
    full = jagged_from_values(values, torch.tensor([0, 5, 12]), lengths=torch.tensor([4, 6]))
    mask = jagged_from_values(torch.ones(12), torch.tensor([0, 6, 12]), lengths=torch.tensor([2, 5]))
    response = response_from_nested(full, mask)
    assert same_rows(response, [values[1:3], values[5:10]])


@pytest.mark.parametrize(
    ("full", "mask", "told"),
    [
        (torch.zeros(2, 3), nested_of([torch.ones(1)]), "full: expected a nested"),
        (nested_of([torch.ones(3)]), torch.zeros(1, 2), "response_mask: expected a nested"),
        (nested_of([torch.ones(3)]), nested_of([torch.ones(1)] * 2), "full has 1 rows, but response_mask has 2 rows"),
        (nested_of([torch.ones(3)] * 2), nested_of([torch.ones(1), torch.ones(3)]), "row 1: the response has 3 tokens"),
    ],
)
def test_response_that_does_not_fit(full: Any, mask: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        response_from_nested(full, mask)


@pytest.mark.parametrize(
    ("tokens", "others"),
    [(None, {"turns", "tagged"}), ([5, 5], {"turns"}), ([8, 5], {"turns", "tagged"}), ([1, 1], {"turns", "tagged"})],
)
def test_a_column_is_per_token_by_its_name_or_by_any_known_lengths(tokens: Any, others: set[str]) -> None:
    columns = {"input_ids": [8, 5], "advantages": [4, 2], "like ids": [8, 5], "like advantages": [4, 2]}
    columns |= {"turns": [1, 2], "tagged": [5, 5]}
    assert not_per_token(columns, tokens) == others


def test_without_lengths_to_compare_with_every_column_is_per_token() -> None:
    assert not not_per_token({"turns": [1, 2]}, None)
    assert not_per_token({"turns": [1, 2]}, [8, 5]) == {"turns"}


# --- Several threads copy; the caller is never ahead of them.


MIB = 1 << 20
WAIT_S = 60.0


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tq-helper"}


class Piece:
    """A target that calls `act` where its bytes would be written."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.nbytes = FROM_BYTES

    def __getitem__(self, part: slice) -> Piece:
        return self

    def __setitem__(self, part: Any, source: Any) -> None:
        self.act()


def acting(*acts: Callable[[], None]) -> list[Any]:
    return [(Piece(act), np.empty(0, np.uint8)) for act in acts]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_byte_of_every_run_is_copied(threads: int) -> None:
    sizes = [0, 1, 100, MIB // 2 + 3, 3 * MIB + 1, 300_000, 5, 7 * MIB]
    sources = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    copier = Copier(threads)
    for _ in range(3):
        copier.copy(list(zip(targets, sources, strict=True)))
        for target, source in zip(targets, sources, strict=True):
            assert np.array_equal(target, source)
            target[:] = 0
    copier.close()
    copier.copy([(targets[-1], sources[-1])])
    assert np.array_equal(targets[-1], sources[-1])


def test_threads_copy_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=WAIT_S)
    copier = Copier(2)
    copier.copy(acting(meeting.wait))
    copier.close()
    assert meeting.n_waiting == 0


def test_small_copies_start_no_thread() -> None:
    before = helpers()
    copier = Copier(4)
    many = [(np.zeros(1000, np.uint8), np.ones(1000, np.uint8)) for _ in range(4000)]
    copier.copy([*many, (np.zeros(MIB, np.uint8), np.ones(MIB, np.uint8))])
    assert all(target.all() for target, _ in many)
    assert helpers() <= before


@pytest.mark.parametrize("end", [Copier.close, lambda copier: None], ids=["closed", "dropped"])
def test_threads_end_with_the_copier(end: Callable[[Copier], None]) -> None:
    before = helpers()
    copier = Copier(3)
    copier.copy([(np.zeros(8 * MIB, np.uint8), np.ones(8 * MIB, np.uint8))])
    started = helpers() - before
    assert len(started) == 2
    end(copier)
    del copier
    gc.collect()
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_nothing_copied_is_held_afterwards() -> None:
    copier = Copier(3)
    for _ in range(20):
        target, source = np.zeros(8 * MIB, np.uint8), np.ones(8 * MIB, np.uint8)
        alive = [weakref.ref(target), weakref.ref(source)]
        copier.copy([(target, source)])
        del target, source
        assert [ref() for ref in alive] == [None, None]
    copier.close()


def test_an_error_in_any_thread_is_the_callers() -> None:
    def fail() -> None:
        raise MemoryError("no space")

    caller = threading.current_thread()
    met = threading.Barrier(2, timeout=WAIT_S)

    def fail_elsewhere() -> None:
        met.wait()
        if threading.current_thread() is not caller:
            fail()

    copier = Copier(2)
    for act in (fail, fail_elsewhere):
        with pytest.raises(MemoryError, match="no space"):
            copier.copy(acting(act))
    copier.close()


def test_an_interrupted_caller_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in its own copy and again while it waits: whoever gives space back after it must not be early."""
    caller = threading.main_thread()
    assert threading.current_thread() is caller
    both = threading.Barrier(2, timeout=WAIT_S)
    waits, left = threading.Event(), threading.Event()
    early: list[bool] = []

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def act() -> None:
        both.wait()
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        waits.wait(WAIT_S)
        assert caller.ident is not None
        for _ in range(20):  # one that comes just before the caller falls asleep does not wake it
            signal.pthread_kill(caller.ident, signal.SIGINT)
            early.append(left.wait(0.01))

    def make(self: helpers_module._Batch[None], jobs: Any) -> None:
        plain(self, jobs)
        self.changed = Watched()

    plain = helpers_module._Batch.__init__
    monkeypatch.setattr(helpers_module._Batch, "__init__", make)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    copier = Copier(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            copier.copy(acting(act))
        left.set()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert early == [False] * 20
    copier.close()


@pytest.mark.integration
def test_a_forked_child_copies_alone() -> None:
    copier = Copier(3)
    runs: list[Run] = [(np.zeros(8 * MIB, np.uint8), np.ones(8 * MIB, np.uint8))]
    copier.copy(runs)
    runs[0][0][:] = 0
    child = os.fork()
    if child == 0:
        copier.copy(runs)
        os._exit(0 if runs[0][0].all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not runs[0][0].any()
    copier.close()


def test_one_thread_for_each_core_up_to_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (3, 3), (64, parallel_copy.MAX_DEFAULT_THREADS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert default_threads() == threads


def test_the_plain_copy() -> None:
    target = np.zeros(3, np.uint8)
    copy_runs([(target[:1], np.array([7], np.uint8)), (target[1:], np.array([8, 9], np.uint8))])
    assert target.tolist() == [7, 8, 9]
