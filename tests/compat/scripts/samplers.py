"""Samplers as objects."""

POLLING = False


class Tags:
    def get_custom_meta(self, indexes):
        return {index: {"total_lengths": [5, 5, 1, 1, 5, 5, 1, 1][index]} for index in indexes}


def run(tq, conf):
    saw = {"sequential": tq.SequentialSampler().sample([4, 7, 9], 2)}
    saw["called"] = tq.SequentialSampler()([1, 2, 3], 5)
    groups = tq.GRPOGroupNSampler(3)
    saw["too few groups"] = groups.sample([0, 1, 3, 4, 6, 7], 6)
    saw["groups"] = groups.sample([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 6)
    config = {"task_name": "t", "partition_id": "p", "dp_rank": 0, "batch_index": 0}
    saw["kept"] = [groups.sample(ready, 3, **config) for ready in ([1, 2, 3], [7, 8, 9])]
    saw["has it"] = [groups.has_cached_result("p", "t", config), groups.has_cached_result("p", "u", config)]
    groups.clear_cache("p")
    saw["has it after clearing"] = groups.has_cached_result("p", "t", config)
    ranks = tq.RankAwareSampler()
    saw["ranks"] = [
        ranks.sample(ready, 2, dp_rank, batch_index, "t", "p")
        for ready, dp_rank, batch_index in (([1, 2, 3], 0, 0), ([3], 0, 0), ([3], 1, 0), ([3, 4], 1, 0))
    ]
    balanced = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    shares = [
        balanced.sample(
            list(range(8)), 4, task_name="t", partition_id="p", partition=Tags(), dp_rank=rank, batch_index=0
        )
        for rank in range(2)
    ]
    sums = [sum(Tags().get_custom_meta([index])[index]["total_lengths"] for index in share[0]) for share in shares]
    saw["balanced"] = [sums, sorted(index for share in shares for index in share[0])]
    return saw
