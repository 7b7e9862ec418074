"""A checkpoint, changes, and back."""

import json
import tempfile
from pathlib import Path

import torch
from tensordict import NonTensorStack, TensorDict

POLLING = False


def run(tq, conf):
    client = tq.get_client()
    fields = {
        "tokens": torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged),
        "reward": torch.tensor([0.5, 1.5]),
        "text": NonTensorStack("a", "b"),
    }
    tq.kv_batch_put(["a", "b"], "kv", TensorDict(fields, batch_size=2), [{"n": 1}, {"n": 2}])
    client.put(TensorDict({"v": torch.arange(4)}, batch_size=4), partition_id="train")
    claimed = values(client)
    client.get_consumption_status("t", "train")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "step" / "1"
        tq.save_checkpoint(place, metadata={"step": 1})
        tq.save_checkpoint(str(place), metadata={"step": 2})
        saw = {"metadata": json.loads((place / "metadata.json").read_text()), "beside": list_of(place.parent)}
        tq.kv_clear("a", "kv")
        tq.kv_put("c", "kv", {"reward": torch.tensor(7.0)}, {"n": 3})
        client.put(TensorDict({"v": torch.arange(2)}, batch_size=2), partition_id="later")
        client.get_meta(["v"], 1, "train", task_name="t")
        tq.load_checkpoint(place)
        saw["keys"] = tq.kv_list("kv")
        saw["read"] = tq.kv_batch_get(["b", "a"], "kv")
        saw["partitions"] = [name for name in ("kv", "train", "later") if name in client.get_partition_list()]
        saw["consumed"] = sorted(client.get_consumption_status("t", "train")[1].tolist())
        saw["goes on"] = sorted(claimed + values(client))
        saw["twice"] = [tq.load_checkpoint(place), tq.kv_list("kv")]
    return saw


def list_of(directory):
    return sorted(entry.name for entry in directory.iterdir())


def values(client):
    """Of the next two samples."""
    return client.get_data(client.get_meta(["v"], 2, "train", task_name="t"))["v"].tolist()
