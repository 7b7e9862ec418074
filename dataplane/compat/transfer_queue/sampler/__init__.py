"""The samplers under the module names of the original package."""

from dataplane.compat.transfer_queue.samplers import BaseSampler as BaseSampler
from dataplane.compat.transfer_queue.samplers import GRPOGroupNSampler as GRPOGroupNSampler
from dataplane.compat.transfer_queue.samplers import RankAwareSampler as RankAwareSampler
from dataplane.compat.transfer_queue.samplers import SeqlenBalancedSampler as SeqlenBalancedSampler
from dataplane.compat.transfer_queue.samplers import SequentialSampler as SequentialSampler

__all__ = ["BaseSampler", "SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler"]
