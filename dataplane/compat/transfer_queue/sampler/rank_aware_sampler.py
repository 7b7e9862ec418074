"""`RankAwareSampler` under the module name of the original package."""

from dataplane.compat.transfer_queue.samplers import RankAwareSampler as RankAwareSampler
