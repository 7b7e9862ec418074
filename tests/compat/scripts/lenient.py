"""Reads of what is not there, or not for all samples."""

import torch
from tensordict import TensorDict

from tests.compat.scripts.errors import caught

POLLING = False


def run(tq, conf):
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"v": torch.arange(2), "t": torch.ones(2, 3)}, batch_size=2))
    meta = tq.kv_put("a", "p", {"w": torch.tensor(1.0)})
    tq.kv_batch_put(["late"], "p", tags=[{"n": 1}])
    gone = tq.KVBatchMeta(["a", "z"], [{}, {}], "p", ["v", "x"])
    client = tq.get_client()
    retrieved = client.kv_retrieve_meta(["z", "b", "a"], "p")
    return {
        "fields that some have": tq.kv_batch_get(["a", "b"], "p", ["v", "w", "x"]),
        "fields that all have": tq.kv_batch_get(["a", "b"], "p"),
        "fields that none has": tq.kv_batch_get(["a", "b"], "p", ["x", "y"]),
        "no fields": tq.kv_batch_get(["a", "b"], "p", []),
        "keys that are there": tq.kv_batch_get(["z", "b", "a"], "p"),
        "and their fields": tq.kv_batch_get(["z", "b", "y", "a"], "p", ["w", "v"]),
        "keys twice": tq.kv_batch_get(["a", "z", "a", "b"], "p", ["v", "x"]),
        "a field twice": tq.kv_batch_get("a", "p", ["v", "v"]),
        "of a meta": tq.kv_batch_get_by_meta(gone),
        "of part of it": tq.kv_batch_get_by_meta(gone, "x"),
        "not of the meta": caught(ValueError, tq.kv_batch_get_by_meta, meta, "x"),
        "no key": caught(ValueError, tq.kv_batch_get, ["y", "z"], "p"),
        "no key, some fields": caught(ValueError, tq.kv_batch_get, ["y", "z"], "p", ["v"]),
        "no partition": caught(ValueError, tq.kv_batch_get, ["a"], "nowhere", ["v"]),
        "nothing in common": caught(ValueError, tq.kv_batch_get, ["a", "late"], "p"),
        "nothing at all": caught(ValueError, tq.kv_batch_get, ["late"], "p", ["v"]),
        "keys of a low-level meta": [retrieved.size, retrieved.field_names, retrieved.is_ready],
        "selected of it": client.get_data(retrieved.select_fields(["v", "x"])),
        "unknown partition of a meta": client.kv_retrieve_meta(["a"], "nowhere").size,
    }
