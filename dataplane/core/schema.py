"""Standard names of data-plane programs: layouts, keys of `KVBatchMeta.extra_info`, tags and columns."""

from __future__ import annotations

import functools
from typing import Literal

from dataplane.core.types import FieldKind, ceil_div

Layout = Literal["padded", "jagged"]
"""Form of jagged fields in a returned batch: right-padded `[N, S, ...]`, or `torch.nested` jagged tensors."""

# Keys of `extra_info`.
GLOBAL_FORWARD_PAD_SEQLEN = "global_forward_pad_seqlen"
"""Length to which every data-parallel rank pads in the forward pass, set by `TQPolicy._stamp_pad_seqlen`."""
PAD_TO_MULTIPLE = "pad_to_multiple"
"""Multiple to which that length is rounded up (for sequence parallelism and kernels); 1 if absent."""
MICRO_BATCH_INDICES = "micro_batch_indices"
"""For each global batch, the `[start, end)` rows of each micro-batch of this shard."""
MICRO_BATCH_LENGTHS = "micro_batch_lengths"
"""For each global batch and micro-batch of this shard, the number of packed tokens, or with dynamic batching the length
to which the rows are cut or padded."""
ELEM_COUNTS_PER_GB = "elem_counts_per_gb"
"""Number of rows of this shard in each global batch."""

DROPPED_SAMPLES = "dropped_samples"
"""In a claimed meta: ids of samples that the task's claims dropped with partial groups since its previous claim."""

EVICTED_SAMPLES = "evicted_samples"
"""In the meta of a put: ids of samples that were evicted for the put before all tasks had consumed them."""

PACKING_KEYS = frozenset({MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB})
"""Keys of `extra_info` whose values refer to the rows of one meta, in row order."""

# Tags and columns.
INPUT_LENGTHS = "input_lengths"
"""Column `[N]` and tag: number of tokens of each sample. Claims copy it to `KVBatchMeta.sequence_lengths`."""
WEIGHT_VERSION = "weight_version"
"""Tag: the trainer's weight version when the sample's generation began."""
INPUT_IDS = "input_ids"
TOKEN_MASK = "token_mask"
SAMPLE_MASK = "sample_mask"
GENERATION_LOGPROBS = "generation_logprobs"
PREV_LOGPROBS = "prev_logprobs"
REFERENCE_POLICY_LOGPROBS = "reference_policy_logprobs"
ADVANTAGES = "advantages"

TOKEN_ALIGNED_FIELDS = frozenset(
    {
        INPUT_IDS,
        TOKEN_MASK,
        "attention_mask",
        "position_ids",
        "response_mask",
        "loss_mask",
        "token_type_ids",
        GENERATION_LOGPROBS,
        PREV_LOGPROBS,
        REFERENCE_POLICY_LOGPROBS,
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_prob",
        "entropy",
        "entropys",
        ADVANTAGES,
        "returns",
        "values",
        "token_level_scores",
        "token_level_rewards",
        "teacher_logprobs",
        "routed_experts",
    }
)
"""Columns with one element per token of the sample, unless a `FieldSpec` overrides this. A tensor of two or more
dimensions put under such a name is stored as jagged, and cut to the samples' lengths if they are known."""


STANDARD_KINDS: dict[str, FieldKind] = {
    **dict.fromkeys(TOKEN_ALIGNED_FIELDS, FieldKind.JAGGED),
    "patches": FieldKind.JAGGED,
    "images": FieldKind.RAGGED,
}
"""Kinds of standard columns whose rows have different shapes. A tensor of two or more dimensions put under such a name
has this kind, unless a `FieldSpec` overrides it."""

# A field is stored in a column of its name, and if needed in hidden columns with these suffixes. Each row of the field
# is in one of these columns.
HIDDEN = "\x1f"
"""The character that begins these suffixes."""
VARIANTS = f"{HIDDEN}variants"
"""Suffix of the column of rows that do not fit the field's spec. They are stored as objects."""
EARLIER: tuple[str, ...] = tuple(f"{HIDDEN}{kind}" for kind in (FieldKind.JAGGED, FieldKind.DENSE, FieldKind.OBJECT))
"""Suffixes of the columns of rows that were put before the field's kind widened, by that kind, the widest first."""


def variants_of(field: str) -> str:
    """Return the name of the field's column of variants."""
    return field + VARIANTS


@functools.lru_cache(maxsize=4096)
def earlier_columns(field: str) -> tuple[str, ...]:
    """Return the names of the field's columns of rows that were put before its kind widened, the widest kind first."""
    return tuple(field + suffix for suffix in EARLIER)


@functools.lru_cache(maxsize=4096)
def columns_of(field: str) -> tuple[str, ...]:
    """Return the names of all columns that can hold rows of the field, the hidden ones after the one of its name."""
    return (field, *earlier_columns(field), variants_of(field))


@functools.lru_cache(maxsize=4096)
def field_of(column: str) -> str:
    """Return the field to which a column belongs, whether the column is hidden or not."""
    name, mark, suffix = column.rpartition(HIDDEN)
    return name if mark and mark + suffix in (VARIANTS, *EARLIER) else column


def round_up(length: int, multiple: int) -> int:
    """Round `length` up to a multiple of `multiple`. Raises ValueError if `multiple` is less than 1."""
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: must be at least 1")
    return ceil_div(length, multiple) * multiple
