"""The low-level client: batches by meta, tasks, tags, what was produced and consumed."""

import asyncio

import torch
from tensordict import TensorDict

POLLING = False


def relative(indexes, first):
    return [int(index) - first for index in indexes]


def known(meta, first):
    return {
        "indexes": relative(meta.global_indexes, first),
        "fields": meta.field_names,
        "ready": meta.is_ready,
        "status": meta.production_status.tolist(),
        "tags": meta.custom_meta,
        "partitions": meta.partition_ids,
    }


def status(pair, first):
    return [None if pair[0] is None else relative(pair[0].tolist(), first), pair[1]]


def run(tq, conf):
    client = tq.get_client()
    saw = {}
    lengths = (3, 1, 2, 4, 2, 1)
    tokens = torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
    data = TensorDict({"tokens": tokens, "index": torch.arange(6), "mask": torch.ones(6, 2)}, batch_size=6)
    put = client.put(data, partition_id="train")
    first = put.global_indexes[0]
    saw["put"] = known(put, first)
    saw["shapes"] = {name: [tuple(shape) for shape in put.get_shapes(name)] for name in put.field_names}

    batch = client.get_meta(["tokens", "index"], 2, "train", task_name="actor")
    saw["first batch"] = known(batch, first)
    saw["its data"] = client.get_data(batch)
    saw["its shapes"] = [tuple(shape) for shape in batch.get_shapes("tokens")]
    saw["its dtypes"] = [str(dtype) for dtype in batch.get_dtypes("tokens")]
    again = client.get_meta(["index"], 2, "train", mode="fetch", task_name="actor")
    saw["second batch"] = known(again, first)
    saw["other task"] = known(client.get_meta(["index"], 4, "train", task_name="critic"), first)

    saw["consumed"] = status(client.get_consumption_status("actor", "train"), first)
    saw["all consumed"] = client.check_consumption_status("actor", "train")
    saw["unknown task"] = status(client.get_consumption_status("nobody", "train"), first)
    saw["unknown partition"] = client.get_consumption_status("actor", "nowhere")

    batch.update_custom_meta([{"score": 0.25}, {"score": 0.75, "kind": "good"}])
    client.set_custom_meta(batch)
    written = client.put(TensorDict({"logprobs": torch.rand(2, 3) * 0 + 1}, batch_size=2), metadata=batch)
    saw["written back"] = known(written, first)
    saw["produced"] = status(client.get_production_status(["index", "logprobs"], "train"), first)
    saw["all produced"] = [
        client.check_production_status(names, "train") for names in (["index"], ["index", "logprobs"], ["unknown"])
    ]
    saw["with the new field"] = known(client.get_meta(["logprobs"], 2, "train", task_name="late"), first)
    saw["everything"] = known(client.get_meta(["index", "logprobs"], 0, "train", mode="force_fetch"), first)
    saw["the rest"] = known(client.get_meta(["index"], 2, "train", task_name="actor"), first)
    saw["now all consumed"] = client.check_consumption_status("actor", "train")

    saw["reset"] = client.reset_consumption("train", "actor")
    saw["after reset"] = known(client.get_meta(["index"], 3, "train", task_name="actor"), first)
    saw["critic stays"] = status(client.get_consumption_status("critic", "train"), first)
    client.reset_consumption("train")
    saw["reset all"] = [client.get_consumption_status(task, "train")[1] for task in ("actor", "critic")]

    empty = client.get_meta(["a"], 2, "fresh", mode="insert")
    saw["inserted"] = [empty.size, empty.is_ready, empty.field_names, empty.get_dtypes("a")]
    client.put(TensorDict({"a": torch.tensor([1, 2])}, batch_size=2), metadata=empty)
    saw["filled"] = client.get_data(client.get_meta(["a"], 2, "fresh", task_name="t"))
    saw["awaited"] = asyncio.run(awaited(client))
    part = put.select_samples([5, 1])
    saw["picked"] = client.get_data(part.select_fields(["index", "tokens"]))
    saw["one twice"] = client.get_data(put.select_samples([5, 1, 5]).select_fields(["index", "tokens"]))
    saw["nothing"] = client.get_data(tq.BatchMeta.empty())
    client.clear_samples(put.select_samples([0, 1]))
    saw["after clearing"] = status(client.get_consumption_status("actor", "train"), first)

    saw["kv"] = by_key(tq, client)
    two = tq.BatchMeta.concat([part.select_fields(["index"])[:1], fresh_of(client)], validate=False)
    saw["two partitions"] = client.get_data(two)
    saw["partitions"] = sorted(client.get_partition_list())
    client.clear_partition("fresh")
    client.clear_partition("nowhere")
    saw["partitions left"] = sorted(client.get_partition_list())
    return saw


def fresh_of(client):
    return client.put(TensorDict({"index": torch.tensor([41])}, batch_size=1), partition_id="other")


def by_key(tq, client):
    tq.kv_batch_put(["x", "y"], "kv", TensorDict({"v": torch.tensor([1, 2])}, batch_size=2), [{"n": 1}, {"n": 2}])
    meta = client.kv_retrieve_meta(["y", "x"], "kv")
    saw = [meta.size, meta.field_names, meta.custom_meta, meta.is_ready, client.get_data(meta)]
    saw.append(client.kv_retrieve_keys(meta.global_indexes, "kv"))
    missing = client.kv_retrieve_meta(["y", "z"], "kv")
    saw += [missing.size, client.kv_retrieve_meta("z", "nowhere").size]
    made = client.kv_retrieve_meta(["z"], "kv", create=True)
    saw += [made.size, made.is_ready, made.field_names, client.kv_list("kv")]
    claimed = client.get_meta(["v"], 2, "kv", task_name="t")
    saw.append(client.kv_retrieve_keys(claimed.global_indexes, "kv"))
    return saw


async def awaited(client):
    meta = await client.async_put(TensorDict({"v": torch.arange(4)}, batch_size=4), partition_id="async")
    first = meta.global_indexes[0]
    batch = await client.async_get_meta(["v"], 2, "async", task_name="t")
    saw = [known(batch, first), await client.async_get_data(batch)]
    saw.append(await client.async_check_production_status(["v"], "async"))
    saw.append(await client.async_check_consumption_status("t", "async"))
    saw.append(status(await client.async_get_consumption_status("t", "async"), first))
    await client.async_reset_consumption("async")
    saw.append(status(await client.async_get_consumption_status("t", "async"), first))
    await client.async_clear_samples(meta[:1])
    saw.append((await client.async_get_consumption_status("t", "async"))[1])
    await client.async_clear_partition("async")
    saw.append("async" in await client.async_get_partition_list())
    return saw
