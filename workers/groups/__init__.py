"""Groups of workers on Ray: placement, start, calls to all workers, and their results.

`worker_group.WorkerGroup` and `ray_worker_group.RayWorkerGroup` are the two interfaces; `worker.Worker` is what a
worker inherits from. Imports `channels`, `messages`, `directory`, `placement` and `errors`.
"""
