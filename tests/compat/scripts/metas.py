"""What metas do by themselves."""

import pickle

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

POLLING = False


def known(meta):
    return {
        "indexes": meta.global_indexes,
        "partitions": meta.partition_ids,
        "fields": meta.field_names,
        "size": [meta.size, len(meta)],
        "ready": meta.is_ready,
        "status": meta.production_status.tolist(),
        "tags": meta.custom_meta,
        "info": meta.extra_info,
        "shapes": {name: [tuple(shape) for shape in meta.get_shapes(name)] for name in meta.field_names},
        "dtypes": {name: [str(dtype) for dtype in meta.get_dtypes(name)] for name in meta.field_names},
    }


def run(tq, conf):
    saw = {}
    schema = {
        "x": {"dtype": torch.int64, "shape": (4,), "is_nested": False, "is_non_tensor": False},
        "y": {
            "dtype": torch.float32,
            "shape": None,
            "is_nested": True,
            "is_non_tensor": False,
            "per_sample_shapes": [(1,), (2,), (3,), (4,), (5,)],
        },
    }
    meta = tq.BatchMeta(
        global_indexes=[3, 4, 5, 7, 8],
        partition_ids=["a", "a", "b", "a", "b"],
        field_schema=schema,
        production_status=np.array([1, 1, 0, 1, 1]),
        extra_info={"step": 1},
        custom_meta=[{"n": number} for number in range(5)],
    )
    saw["made"] = known(meta)
    saw["chunks"] = [known(part) for part in meta.chunk(3)]
    saw["more chunks than samples"] = [part.size for part in meta.chunk(7)]
    saw["by partition"] = [known(part) for part in meta.chunk_by_partition()]
    saw["joined again"] = known(tq.BatchMeta.concat(meta.chunk(2)))
    saw["selected"] = known(meta.select_samples([4, 0]))
    saw["fields"] = known(meta.select_fields(["y", "unknown"]))
    saw["one"] = known(meta[-1])
    saw["slice"] = known(meta[1:4:2])
    saw["samples"] = [
        [sample.global_index, sample.partition_id, sample.production_status, dict(sample.custom_meta)]
        + [tuple(sample.fields[name]["shape"]) for name in ("x", "y")]
        for sample in meta.samples
    ]
    other = tq.BatchMeta(meta.global_indexes, meta.partition_ids, {"z": schema["x"]}, np.ones(5), {"more": 2})
    other.update_custom_meta([{"n": 9}, {}, {}, {"m": 1}, {}])
    saw["union"] = known(meta.union(other))
    saw["with none"] = [known(meta.union(tq.BatchMeta.empty())), known(tq.BatchMeta.empty().union(meta))]
    moved = meta.copy()
    moved.reorder([4, 3, 2, 1, 0])
    saw["reordered"] = known(moved)
    saw["not moved"] = known(meta)
    saw["pickled"] = known(pickle.loads(pickle.dumps(meta)))
    more = meta.copy()
    more.add_fields(TensorDict({"w": torch.zeros(5), "t": NonTensorStack(*"abcde")}, batch_size=5))
    saw["added"] = [more.field_names, more.is_ready, [tuple(shape) for shape in more.get_shapes("w")]]
    more.set_extra_info("k", 1)
    more.update_extra_info({"l": 2})
    saw["info"] = [more.get_extra_info("k"), more.get_extra_info("?", 3), more.has_extra_info("l")]
    saw["info after"] = [more.remove_extra_info("k"), more.get_all_extra_info()]
    more.clear_extra_info()
    more.clear_custom_meta()
    saw["cleared"] = [more.extra_info, more.get_all_custom_meta()]
    saw["empty"] = [known(tq.BatchMeta.empty({"a": 1})), known(tq.BatchMeta.concat([]))]

    keyed = tq.KVBatchMeta(["a", "b", "c"], [{"n": 1}, {"n": 2}, {"n": 3}], "p", ["x"], {"i": [1]})
    saw["chunks by key"] = [[part.keys, part.tags, part.fields] for part in keyed.chunk(2)]
    saw["joined by key"] = vars_of(tq.KVBatchMeta.concat(keyed.chunk(2)))
    saw["selected by key"] = vars_of(keyed.select_keys(["c", "a"]))
    keyed.reorder([2, 0, 1])
    saw["reordered by key"] = vars_of(keyed)
    saw["empty by key"] = [vars_of(tq.KVBatchMeta()), vars_of(tq.KVBatchMeta.concat([]))]
    return saw


def vars_of(meta):
    return [meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info, meta.size, len(meta)]
