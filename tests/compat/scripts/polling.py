"""A service that answers at once: the tasks come again."""

import torch
from tensordict import TensorDict

POLLING = True


def run(tq, conf):
    client = tq.get_client()
    saw = {"no partition": client.get_meta(["v"], 2, "train", task_name="t").size}
    put = client.put(TensorDict({"v": torch.arange(3)}, batch_size=3), partition_id="train")
    first = put.global_indexes[0]
    saw["no such field"] = client.get_meta(["w"], 2, "train", task_name="t").size
    saw["too many"] = client.get_meta(["v"], 4, "train", task_name="t").size
    saw["nothing was taken"] = [index - first for index in taken(client, 2)]
    saw["one is left"] = taken(client, 2)
    client.put(TensorDict({"v": torch.arange(2)}, batch_size=2), partition_id="train")
    saw["oldest first"] = [index - first for index in taken(client, 2)]
    saw["consumed"] = client.get_consumption_status("t", "train")[1]
    return saw


def taken(client, count):
    return client.get_meta(["v"], count, "train", task_name="t").global_indexes
