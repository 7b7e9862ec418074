"""Calls with unusual arguments: unknown partitions, no samples, fields in any order or twice."""

import torch
from tensordict import NonTensorStack, TensorDict

from tests.compat.scripts.errors import caught

POLLING = True


def run(tq, conf):
    client = tq.get_client()
    saw = {**unknown_partitions(tq, client), **fields(tq, client), **metas(tq)}
    return {**saw, **cleared(tq, client), **sizes(tq, client), **keys(tq, client)}


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


def cleared(tq, client):
    """A partition keeps the fields whose values were all cleared."""
    saw = {}
    tq.kv_put("a", "c", {"v": torch.tensor(1), "w": torch.tensor(2), "x": torch.zeros(2, 2)})
    tq.kv_put("b", "c", {"v": torch.tensor(1)})

    def see(what):
        saw[f"produced {what}"] = [
            [client.get_production_status(names, "c")[1], client.check_production_status(names, "c")]
            for names in (["x", "w", "v"], ["w"], ["v"])
        ]

    see("by two")
    tq.kv_clear("a", "c")
    see("by one")
    tq.kv_clear("b", "c")
    see("by none")
    tq.kv_put("d", "c", {"w": torch.tensor(1)})
    see("by another")
    meta = client.put(TensorDict({"v": torch.arange(2)}, batch_size=2), partition_id="m")
    client.clear_samples(meta)
    saw["produced by nothing"] = client.get_production_status(["v"], "m")[1]
    # The package does not drop a partition without samples.
    client.put(TensorDict({"v": torch.arange(2)}, batch_size=2), partition_id="m")
    return saw


def sizes(tq, client):
    saw = {}
    for size in (True, False, 1.0, 2.5, "1"):
        name = f"s{size!r}"
        client.put(TensorDict({"v": torch.arange(3)}, batch_size=3), partition_id=name)
        if isinstance(size, bool):
            saw[f"fetch {name}"] = known(client.get_meta(["v"], size, name, task_name="t"))
            saw[f"insert {name}"] = known(client.get_meta(["v"], size, name, mode="insert"))
        else:
            saw[f"fetch {name}"] = caught(RuntimeError, client.get_meta, ["v"], size, name, task_name="t")
            saw[f"insert {name}"] = caught(RuntimeError, client.get_meta, ["v"], size, name, "insert")
        saw[f"force {name}"] = client.get_meta(["v"], size, name, mode="force_fetch").size
        saw[f"claimed {name}"] = client.get_consumption_status("t", name)[1]
    return saw


def keys(tq, client):
    two = TensorDict({"v": torch.arange(2)}, batch_size=2)
    tq.kv_batch_put(["a", "b"], "k", two, [{"n": 1}, {"n": 2}])
    saw = {"put twice": caught(ValueError, tq.kv_batch_put, ["c", "c"], "other", two)}
    saw["got twice"] = tq.kv_batch_get(["a", "b", "a"], "k")
    for names, create in ((["a", "a", "b"], False), (["x", "x", "b"], False), (["x", "x", "b"], True)):
        meta = client.kv_retrieve_meta(names, "k", create=create)
        saw[f"meta of {names} {create}"] = [known(meta), meta.custom_meta]
    saw["created twice"] = tq.kv_list("k")
    tq.kv_clear(["a", "a", "none"], "k")
    saw["cleared twice"] = tq.kv_list("k")
    for call in (tq.kv_batch_put, tq.kv_batch_get, tq.kv_clear, client.kv_retrieve_meta):
        saw.setdefault("no keys", []).append(caught(ValueError, call, [], "k"))
    return saw
