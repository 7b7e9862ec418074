"""Packing of sequences into bins, and of samples to data-parallel ranks, by length. Does not import torch."""

from dataplane.data.packing.packers import ConcatenativePacker as ConcatenativePacker
from dataplane.data.packing.packers import FirstFitDecreasingPacker as FirstFitDecreasingPacker
from dataplane.data.packing.packers import FirstFitShufflePacker as FirstFitShufflePacker
from dataplane.data.packing.packers import ModifiedFirstFitDecreasingPacker as ModifiedFirstFitDecreasingPacker
from dataplane.data.packing.packers import PackingAlgorithm as PackingAlgorithm
from dataplane.data.packing.packers import SequencePacker as SequencePacker
from dataplane.data.packing.packers import get_packer as get_packer
from dataplane.data.packing.shards import Shard as Shard
from dataplane.data.packing.shards import inverse_permutation as inverse_permutation
from dataplane.data.packing.shards import plan_shards as plan_shards
from dataplane.data.packing.shards import shard_meta_for_dp as shard_meta_for_dp

__all__ = [
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackingAlgorithm",
    "SequencePacker",
    "Shard",
    "get_packer",
    "inverse_permutation",
    "plan_shards",
    "shard_meta_for_dp",
]
