"""Policy workers on the data plane: `mixin.TQWorkerMixin` in the worker, `policy.TQPolicy` in the driver.

The leader of a replica reads its samples and broadcasts them to its siblings (`replica_group`).
Imports `groups`, `placement` and `errors`. Start with `policy` and `mixin`.
"""
