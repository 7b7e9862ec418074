"""Whole groups of two."""

import torch
from tensordict import TensorDict

POLLING = True


def sampler(tq):
    return tq.GRPOGroupNSampler(n_samples_per_prompt=2)


def run(tq, conf):
    client = tq.get_client()
    put = client.put(TensorDict({"prompt": torch.arange(8)}, batch_size=8), partition_id="train")
    first = put.global_indexes[0]

    def claim(size, **config):
        meta = client.get_meta(["reply"], size, "train", task_name="t", sampling_config=config or None)
        return [index - first for index in meta.global_indexes]

    saw = {"none has a reply": claim(2)}
    ready = put.select_samples([0, 2, 3, 5, 6, 7])
    client.put(TensorDict({"reply": torch.arange(6)}, batch_size=6), metadata=ready)
    saw["one whole group"] = claim(2)
    saw["no two whole groups"] = claim(4)
    client.put(TensorDict({"reply": torch.arange(2)}, batch_size=2), metadata=put.select_samples([1, 4]))
    both = claim(4, dp_rank=0, batch_index=0, task_name="t", partition_id="train")
    saw["two groups"] = both
    saw["the same again"] = claim(4, dp_rank=0, batch_index=0, task_name="t", partition_id="train") == both
    return saw
