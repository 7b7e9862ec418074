"""Names that programs on the data plane agree on: layouts, keys of `KVBatchMeta.extra_info`, tags, standard columns."""

from __future__ import annotations

from typing import Literal

Layout = Literal["padded", "jagged"]
"""How jagged fields come back in a batch: right-padded `[N, S, ...]`, or `torch.nested` jagged tensors."""

# Keys of `extra_info`.
GLOBAL_FORWARD_PAD_SEQLEN = "global_forward_pad_seqlen"
"""Length that every data-parallel rank pads to in the forward pass, minted by `TQPolicy._stamp_pad_seqlen`."""
PAD_TO_MULTIPLE = "pad_to_multiple"
"""What that length is rounded up to (sequence parallelism, kernels); 1 when absent."""
MICRO_BATCH_INDICES = "micro_batch_indices"
"""Per global batch, `[start, end)` rows of each micro-batch of this shard."""
MICRO_BATCH_LENGTHS = "micro_batch_lengths"
"""Per global batch, of each micro-batch of this shard the tokens packed into it, or the length that its rows are cut
or padded to (dynamic batching)."""
ELEM_COUNTS_PER_GB = "elem_counts_per_gb"
"""Rows of this shard in each global batch."""

DROPPED_SAMPLES = "dropped_samples"
"""Of a claimed meta: ids that claims of the task dropped with their partial groups since its last claim."""

EVICTED_SAMPLES = "evicted_samples"
"""Of a put's meta: ids of samples that were evicted for it before all tasks had consumed them."""

PACKING_KEYS = frozenset({MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB})
"""Keys of `extra_info` that speak of exactly the rows of one meta, in their order."""

# Tags and columns.
INPUT_LENGTHS = "input_lengths"
"""Column `[N]` and tag: the tokens of each sample; lifted into `KVBatchMeta.sequence_lengths` by claims."""
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
"""Columns with one element per token of the sample, unless a `FieldSpec` says otherwise: a tensor of two or more
dimensions put under such a name is jagged, and cut to the samples' lengths where they are known."""


VARIANTS = "\x1fvariants"
"""Ends the name of the hidden column of a field: rows that do not fit the field's spec, as objects. A row of the field
is in one of the two columns, and both count as the one field."""


def variants_of(field: str) -> str:
    """The hidden column of the field."""
    return field + VARIANTS


def field_of(column: str) -> str:
    """The field that a column, hidden or not, is of."""
    return column.removesuffix(VARIANTS)


def round_up(length: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `length`."""
    if multiple < 1:
        raise ValueError(f"a length can be rounded up to a multiple of 1 or more, not of {multiple}")
    return -(-length // multiple) * multiple
