"""Calls with unusual arguments: unknown partitions, no samples, fields in any order or twice."""

import torch
from tensordict import NonTensorStack, TensorDict

from tests.compat.scripts.errors import caught

POLLING = True


def run(tq, conf):
    return {**unknown_partitions(tq, tq.get_client()), **fields(tq, tq.get_client()), **metas(tq)}


def known(meta):
    status = meta.production_status.tolist()
    return [meta.size, meta.field_names, meta.is_ready, status, meta.partition_ids]


def says(text, call, *args):
    try:
        call(*args)
    except ValueError as error:
        return text in str(error)
    return "nothing"


def unknown_partitions(tq, client):
    saw = {}

    def see(what, value):
        saw[what] = [value, sorted(client.get_partition_list()), tq.kv_list("p")]

    see("fetch", known(client.get_meta(["v"], 2, "p", task_name="t")))
    see("fetch none", known(client.get_meta(["v"], 0, "p", task_name="t")))
    see("force_fetch", caught(RuntimeError, client.get_meta, ["v"], 2, "p", mode="force_fetch"))
    see("without size", caught(RuntimeError, client.get_meta, ["v"], None, "p", task_name="t"))
    see("read", says("keys or partition were not found", tq.kv_batch_get, ["a"], "p"))
    see("claimed", client.get_consumption_status("t", "p"))
    see("produced", client.get_production_status(["v"], "p"))
    see("insert none", known(client.get_meta(["v"], 0, "p", mode="insert")))
    see("insert less", known(client.get_meta(["v"], -1, "q", mode="insert")))
    inserted = client.get_meta(["v"], 2, "r", mode="insert")
    see("insert", known(inserted))
    client.put(TensorDict({"v": torch.zeros(2)}, batch_size=2), inserted)
    return saw


def fields(tq, client):
    values = {"z": torch.tensor(1), "t": "text", "a": torch.zeros(2, 2), "m": torch.zeros(3)}
    tq.kv_put("all", "f", values)
    tq.kv_put("z", "f", {"z": torch.tensor(2)})
    tq.kv_put("t", "f", {"t": "other"})
    two = {"b": NonTensorStack(1, [2]), "a": torch.ones(2, 1, 2)}
    tq.kv_batch_put(["a", "b"], "f", TensorDict(two, batch_size=2))
    tq.kv_put("tag", "f", tag={"n": 1})
    not_found = "keys or partition were not found"
    not_ready = "Some fields are not ready in all the requested keys"
    saw = {
        "missing keys": says(not_found, tq.kv_batch_get, ["x", "y"], "f", ["z"]),
        "a key without fields": says(not_ready, tq.kv_batch_get, "tag", "f"),
        "no fields": caught(RuntimeError, client.get_meta, None, 1, "f", task_name="t"),
        "columns of all": list(tq.kv_batch_get("all", "f").keys()),
        "columns of some": list(tq.kv_batch_get(["all"], "f", ["z", "m", "a", "z"]).keys()),
    }
    for names in ("az", "za", "mtza", "btb", "tt", ["b", "unknown"], []):
        saw[f"produced {names}"] = client.get_production_status(list(names), "f")[1]
    return saw


def metas(tq):
    saw = {}
    orders = ([], [0, 0, 1], [1, 1, 1], [2, 1], [2, 1, 3], [2, 0, -1], [2, -1, 0], [-1, -2, -3])
    kinds = {
        "batch": lambda: tq.BatchMeta([4, 5, 6], ["p", "q", "p"]),
        "keys": lambda: tq.KVBatchMeta(["a", "b", "c"], [{"n": 1}, {"n": 2}, {"n": 3}]),
    }
    for kind, make in kinds.items():
        names = "keys" if kind == "keys" else "global_indexes"
        for chunks in (-2, -1, True, 1, 4):
            saw[f"{kind} in {chunks}"] = [getattr(part, names) for part in make().chunk(chunks)]
        saw[f"{kind} in none"] = caught(ZeroDivisionError, make().chunk, 0)
        saw[f"{kind} in a half"] = caught(TypeError, make().chunk, 0.5)
        for order in orders:
            meta = make()
            saw[f"{kind} as {order}"] = [caught(ValueError, meta.reorder, order)]
            saw[f"{kind} after {order}"] = getattr(meta, names)
        saw[f"no {kind} joined"] = type(make()).concat(None).size
    return saw
