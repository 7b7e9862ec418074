"""Objects in fields: containers that the package returns as they were, arrays of strings, images."""

import numpy as np
from PIL import Image
from tensordict import NonTensorStack, TensorDict

POLLING = False


def run(tq, conf):
    rows = [{"deep": [["a"], {"b": None}]}, [1, "b"], None, 1.5]
    image = Image.frombytes("RGB", (2, 2), bytes(range(12)))
    tq.kv_batch_put(list("abcd"), "p", TensorDict({"x": NonTensorStack(*rows)}, batch_size=4))
    tq.kv_put("a", "p", {"image": image, "all": [image.convert("L")], "word": np.bytes_(b"w")})
    words = TensorDict({"w": np.array([b"one", b"two"], dtype="|S5")}, batch_size=2)
    put = tq.get_client().put(words, partition_id="words")
    return {
        "containers": tq.kv_batch_get(list("abcd"), "p"),
        "images": tq.kv_batch_get("a", "p", ["image", "all", "word"]),
        "arrays of strings": tq.get_client().get_data(put),
    }
