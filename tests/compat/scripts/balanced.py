"""A step dealt to ranks by the lengths of the samples, in whole groups."""

import torch
from tensordict import TensorDict

LENGTHS = (9, 9, 1, 1, 5, 5, 5, 5)
POLLING = True


def sampler(tq):
    return tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)


def run(tq, conf):
    client = tq.get_client()
    put = client.get_meta(["v"], 8, "train", mode="insert")
    put.update_custom_meta([{"total_lengths": length} for length in LENGTHS])
    client.put(TensorDict({"v": torch.arange(8)}, batch_size=8), metadata=put)
    first, shares = put.global_indexes[0], []
    for rank in (1, 0):
        config = {"dp_rank": rank, "batch_index": 0, "task_name": "t", "partition_id": "train"}
        meta = client.get_meta(["v"], 4, "train", task_name="t", sampling_config=config)
        shares.append([index - first for index in meta.global_indexes])
    return {
        "sizes": [len(share) for share in shares],
        "sums": [sum(LENGTHS[index] for index in share) for share in shares],
        "whole groups": [all(index ^ 1 in share for index in share) for share in shares],
        "each once": sorted(shares[0] + shares[1]),
        "all consumed": client.check_consumption_status("t", "train"),
    }
