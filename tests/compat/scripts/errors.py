"""What is refused, as callers would catch it."""

import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict

POLLING = False


def caught(kind, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except kind:
        return kind.__name__
    except Exception as error:
        return f"not {kind.__name__} but {type(error).__mro__}"
    return "nothing"


def run(tq, conf):
    client = tq.get_client()
    two = TensorDict({"v": torch.arange(2)}, batch_size=2)
    tq.kv_batch_put(["a", "b"], "kv", two)
    put = client.put(two, partition_id="train")
    meta = tq.KVBatchMeta(["a"], [{}], "kv", ["v"])
    nested = torch.nested.as_nested_tensor([torch.arange(2)], layout=torch.jagged)
    batch = tq.BatchMeta([1, 2], ["p", "p"])
    with tempfile.TemporaryDirectory() as directory:
        no_checkpoint = caught(FileNotFoundError, tq.load_checkpoint, Path(directory) / "none")
    return {
        "put nothing": caught(ValueError, tq.kv_put, "a", "kv"),
        "put no mapping": caught(ValueError, tq.kv_put, "a", "kv", [1]),
        "put nested as one": caught(ValueError, tq.kv_put, "a", "kv", {"v": nested}),
        "batch of nothing": caught(ValueError, tq.kv_batch_put, ["a"], "kv"),
        "other rows than keys": caught(ValueError, tq.kv_batch_put, ["a"], "kv", two),
        "other tags than keys": caught(ValueError, tq.kv_batch_put, ["a", "b"], "kv", two, [{}]),
        "no keys": caught(ValueError, tq.kv_batch_get, [], "kv"),
        "keys that are no strings": caught(TypeError, tq.kv_batch_get, [1], "kv"),
        "keys that are no list": caught(TypeError, tq.kv_batch_get, ("a",), "kv"),
        "unknown keys": caught(ValueError, tq.kv_batch_get, ["z"], "kv"),
        "unknown partition": caught(ValueError, tq.kv_batch_get, ["a"], "nowhere"),
        "fields not of the meta": caught(ValueError, tq.kv_batch_get_by_meta, meta, "w"),
        "meta of no partition": caught(ValueError, tq.kv_batch_get_by_meta, tq.KVBatchMeta(["a"], [{}])),
        "put without partition": caught(ValueError, client.put, two),
        "put with an empty meta": caught(ValueError, client.put, two, tq.BatchMeta.empty()),
        "too few samples": caught(RuntimeError, client.get_meta, ["v"], 9, "train", task_name="t"),
        "no task": caught(Exception, client.get_meta, ["v"], 1, "train"),
        "indexes that are no integers": caught(TypeError, client.kv_retrieve_keys, ["a"], "kv"),
        "no indexes": caught(ValueError, client.kv_retrieve_keys, [], "kv"),
        "no such samples": caught(ValueError, put.select_samples, [5]),
        "no such place": caught(IndexError, put.__getitem__, 7),
        "no such index type": caught(TypeError, put.__getitem__, "a"),
        "no such field": caught(KeyError, put.get_shapes, "w"),
        "wrong order": caught(ValueError, put.reorder, [0, 0]),
        "fields of other rows": caught(ValueError, batch.add_fields, TensorDict({"v": torch.zeros(3)}, batch_size=3)),
        "lists that do not align": caught(ValueError, tq.BatchMeta, [1], []),
        "joining other fields": caught(ValueError, tq.BatchMeta.concat, [put, batch]),
        "union of others": caught(ValueError, put.union, batch),
        "keys twice": caught(ValueError, tq.KVBatchMeta, ["a", "a"], [{}, {}]),
        "selecting unknown keys": caught(RuntimeError, meta.select_keys, ["z"]),
        "selecting keys twice": caught(ValueError, meta.select_keys, ["a", "a"]),
        "group of none": caught(ValueError, tq.GRPOGroupNSampler, 0),
        "no whole groups": caught(ValueError, tq.GRPOGroupNSampler(2).sample, [1, 2, 3], 3),
        "negative rank": caught(ValueError, tq.RankAwareSampler().sample, [1], 1, -1, 0, "t", "p"),
        "no checkpoint": no_checkpoint,
    }
