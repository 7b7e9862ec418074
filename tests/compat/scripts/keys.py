"""The high-level interface: samples by key."""

import asyncio

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

POLLING = False


def nested(*lengths, dtype=torch.float32):
    rows = [torch.arange(length, dtype=dtype) + 10 * place for place, length in enumerate(lengths)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def known(meta):
    return {"keys": meta.keys, "tags": meta.tags, "partition": meta.partition_id, "fields": meta.fields}


def run(tq, conf):
    saw = {}
    saw["one"] = known(
        tq.kv_put(key="k0", partition_id="train", fields={"ids": torch.tensor([1, 2, 3])}, tag={"score": 0.5})
    )
    saw["one read"] = tq.kv_batch_get("k0", "train")
    saw["objects"] = known(tq.kv_put("k1", "train", {"ids": torch.tensor([4, 5, 6, 7]), "text": "words"}, {"n": 2}))
    saw["different lengths"] = tq.kv_batch_get(["k1", "k0"], "train", select_fields="ids")
    saw["the object"] = tq.kv_batch_get("k1", "train", ["text"])

    keys = ["a", "b", "c"]
    fields = TensorDict(
        {
            "tokens": nested(5, 1, 3, dtype=torch.int64),
            "wide": torch.arange(12, dtype=torch.float32).reshape(3, 4),
            "image": torch.arange(48, dtype=torch.uint8).reshape(3, 4, 2, 2),
            "hidden": torch.arange(24, dtype=torch.bfloat16).reshape(3, 4, 2),
            "reward": torch.tensor([1.0, 0.0, 0.5]),
            "column": torch.tensor([[1.0], [0.0], [0.5]], dtype=torch.float64),
            "done": torch.tensor([True, False, True]),
            "meta": NonTensorStack({"x": [1, 2]}, {"x": []}, {"x": None}),
        },
        batch_size=3,
    )
    tags = [{"score": 1.0, "name": "x"}, {}, {"name": None}]
    meta = tq.kv_batch_put(keys=keys, partition_id="val", fields=fields, tags=tags)
    saw["batch"] = known(meta)
    saw["batch read"] = tq.kv_batch_get_by_meta(meta)
    saw["other order"] = tq.kv_batch_get(["c", "a"], "val", ["reward", "tokens"])
    saw["of a meta"] = tq.kv_batch_get_by_meta(meta, select_fields="wide")
    saw["of part of it"] = tq.kv_batch_get_by_meta(meta.select_keys(["b"]), ["tokens", "wide"])

    saw["more fields"] = known(
        tq.kv_batch_put(["a", "b"], "val", TensorDict({"value": torch.tensor([7, 8])}, batch_size=2))
    )
    saw["again"] = known(tq.kv_batch_put(["a"], "val", TensorDict({"reward": torch.tensor([9.0])}, batch_size=1)))
    saw["after both"] = tq.kv_batch_get(["a", "b"], "val", ["reward", "value"])
    saw["other width"] = known(
        tq.kv_put("d", "val", {"wide": torch.ones(6), "image": torch.ones(1, 2, 3, dtype=torch.uint8)})
    )
    saw["widths"] = tq.kv_batch_get(["c", "d"], "val", ["wide"])
    saw["one twice"] = tq.kv_batch_get(["c", "a", "c"], "val", ["reward", "wide", "meta"])
    saw["tags only"] = known(tq.kv_batch_put(["a", "new"], "val", tags=[{"score": 2.0}, {"late": True}]))
    saw["list"] = tq.kv_list("val")
    saw["all partitions"] = tq.kv_list()
    saw["no such partition"] = tq.kv_list("nowhere")

    tq.kv_clear("new", "val")
    tq.kv_clear(["b", "unknown"], "val")
    tq.kv_clear("a", "nowhere")
    saw["after clearing"] = tq.kv_list("val")

    def parse(columns):
        columns["url"][:] = [value.upper() for value in columns["url"]]
        columns["x"] += 1
        return columns

    tq.kv_batch_put(
        ["p", "q"],
        "parsed",
        TensorDict({"url": NonTensorStack("u", "v"), "x": torch.zeros(2, 3)}, batch_size=2),
        data_parser=parse,
    )
    saw["parsed"] = tq.kv_batch_get(["p", "q"], "parsed")

    saw["wide rows"] = wide_rows(tq)
    tq.kv_put("a", "arrays", {"a": np.arange(3), "b": np.float32(0.5), "c": [np.arange(2)]})
    tq.kv_batch_put(["b"], "arrays", TensorDict({"a": NonTensorStack(np.ones((2, 2)))}, batch_size=1))
    saw["arrays"] = [tq.kv_batch_get(["b", "a"], "arrays", ["a"]), tq.kv_batch_get("a", "arrays", ["b", "c"])]

    saw["awaited"] = asyncio.run(awaited(tq))
    saw["awaited on another loop"] = asyncio.run(awaited(tq))
    return saw


def wide_rows(tq):
    """Of two dimensions, the second of which differs: position ids of models that see images."""
    for key, length in (("a", 5), ("b", 7), ("c", 3)):
        ids = torch.arange(3 * length).reshape(1, 3, length)
        tq.kv_batch_put([key], "wide", TensorDict({"ids": ids, "list": NonTensorStack(ids[0])}, batch_size=1))
    saw = [tq.kv_batch_get(["a", "b", "c"], "wide")]
    for lengths in ((2, 2), (2, 4)):
        rows = [torch.arange(3 * length).reshape(3, length) for length in lengths]
        fields = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
        tq.kv_batch_put(["d", "e"], "wide", TensorDict(fields, batch_size=2))
        saw.append(tq.kv_batch_get(["d", "e", "a"], "wide", "ids"))
    return saw


async def awaited(tq):
    saw = {"one": known(await tq.async_kv_put("k", "async", {"x": torch.arange(2)}, {"n": 1}))}
    batch = TensorDict({"x": nested(2, 4, dtype=torch.int64)}, batch_size=2)
    meta = await tq.async_kv_batch_put(["l", "m"], "async", batch, [{"n": 2}, {"n": 3}])
    saw["batch"] = known(meta)
    saw["read"] = await tq.async_kv_batch_get(["m", "k"], "async", "x")
    saw["of a meta"] = await tq.async_kv_batch_get_by_meta(meta)
    saw["list"] = await tq.async_kv_list("async")
    both = await asyncio.gather(*(tq.async_kv_batch_get(key, "async") for key in "klm"))
    saw["at once"] = list(both)
    await tq.async_kv_clear(["k", "l"], "async")
    saw["left"] = await tq.async_kv_list("async")
    await tq.async_kv_clear("m", "async")
    return saw
