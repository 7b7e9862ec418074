"""Fields whose values change their shape or kind: each row is what was put last."""

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

POLLING = False


def known(meta):
    return {"keys": meta.keys, "tags": meta.tags, "fields": meta.fields}


def run(tq, conf):
    client = tq.get_client()
    saw = {}
    keys = ["a", "b", "c"]
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.arange(9).reshape(3, 3), "y": torch.arange(3)}, batch_size=3))
    saw["more dimensions"] = known(tq.kv_put("b", "p", {"x": torch.ones(2, 2, dtype=torch.int64)}))
    saw["both"] = tq.kv_batch_get(keys, "p")
    saw["one of each"] = [tq.kv_batch_get(key, "p", "x") for key in "ab"]
    saw["kv_list"] = tq.kv_list("p")
    saw["all produced"] = client.check_production_status(["x", "y"], "p")
    saw["of a task"] = client.get_data(client.get_meta(["x", "y"], 3, "p", task_name="t"))
    tq.kv_put("b", "p", {"x": torch.arange(4)})
    saw["as before"] = tq.kv_batch_get(keys, "p", ["x"])
    tq.kv_put("c", "p", {"x": torch.tensor(7)})
    tq.kv_put("a", "p", {"y": torch.tensor([1, 2])})
    saw["scalars and rows"] = tq.kv_batch_get(keys, "p", ["x", "y"])
    saw["more fields"] = known(tq.kv_put("b", "p", {"z": "text"}, {"n": 1}))
    tq.kv_put("a", "p", {"z": torch.tensor([1.0, 2.0])})
    saw["objects and tensors"] = tq.kv_batch_get(["a", "b"], "p", ["z", "x"])
    tq.kv_put("b", "p", {"z": {"now": ["an", "object"]}})
    saw["other objects"] = tq.kv_batch_get(["b", "a"], "p", ["z"])
    tq.kv_clear(["a", "b"], "p")
    saw["what is left"] = tq.kv_batch_get(["c"], "p")

    mixed = NonTensorStack(torch.arange(3), torch.ones(2, 2), {"k": 1})
    tq.kv_batch_put(keys, "mixed", TensorDict({"m": mixed}, batch_size=3))
    saw["mixed in one put"] = tq.kv_batch_get(keys, "mixed")
    words = NonTensorData(np.array(["one", "two", "three"], dtype=object), batch_size=[3])
    lists = NonTensorData([[1], [2, 3], []], batch_size=[3])
    put = client.put(TensorDict({"words": words, "lists": lists}, batch_size=3), partition_id="arrays")
    saw["arrays as rows"] = client.get_data(put)

    tags = [{"list": [1, "a"], "none": None}, {"map": {"k": [1.5, None]}, "text": "t"}, {}]
    saw["tags"] = known(tq.kv_batch_put(keys, "tags", tags=tags))
    saw["tags listed"] = tq.kv_list("tags")
    saw["one more"] = known(tq.kv_put("a", "tags", tag={"none": [None, True], "list": "no list"}))
    saw["tags of a meta"] = client.kv_retrieve_meta(["a", "b"], "tags").custom_meta
    return saw
