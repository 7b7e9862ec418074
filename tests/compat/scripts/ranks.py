"""Data-parallel ranks whose processes get the same batches, and torch data loaders over them."""

import torch
from tensordict import NonTensorStack, TensorDict

POLLING = True


def sampler(tq):
    return tq.RankAwareSampler()


def run(tq, conf):
    client = tq.get_client()
    rows = [torch.arange(length) for length in (1, 2, 3, 4, 1, 2, 3, 4)]
    data = {
        "tokens": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "place": torch.arange(8),
        "text": NonTensorStack(*"abcdefgh"),
    }
    put = client.put(TensorDict(data, batch_size=8), partition_id="train")
    first = put.global_indexes[0]

    def claim(rank, batch):
        config = {"dp_rank": rank, "batch_index": batch, "task_name": "t", "partition_id": "train"}
        meta = client.get_meta(["place"], 2, "train", task_name="t", sampling_config=config)
        return [index - first for index in meta.global_indexes]

    saw = {"asked": [claim(*asked) for asked in ((0, 0), (1, 0), (0, 0), (1, 1), (0, 1), (1, 0), (0, 2))]}
    saw["loaded"] = loaded(tq, conf)
    return saw


def loaded(tq, conf):
    dataset = tq.StreamingDataset(
        config=conf,
        batch_size=4,
        micro_batch_size=2,
        data_fields=["place", "tokens", "text"],
        partition_id="train",
        task_name="loader",
        dp_rank=0,
        should_check_consumption_status=True,
    )
    loader = tq.StreamingDataLoader(dataset)
    seen = [[batch, meta.size, meta.field_names] for batch, meta in loader]
    loader.reset()
    again = [batch["place"] for batch, _ in loader]
    held = len(loader.get_buffer())
    loader.step("other")
    tq.get_client().put(TensorDict(other(), batch_size=4), partition_id="other")
    return {"seen": seen, "again": again, "held": held, "other": [batch["place"] for batch, _ in loader]}


def other():
    rows = [torch.arange(2) for _ in range(4)]
    return {
        "tokens": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "place": torch.arange(4),
        "text": NonTensorStack(*"wxyz"),
    }
