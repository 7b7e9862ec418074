"""Groups of workers on Ray: placement, start, calls to all workers, and their results.

`worker_group.WorkerGroup` and `ray_worker_group.RayWorkerGroup` are the two interfaces, both on a
`started_group.StartedGroup` and with results waited for by a `futures.GroupFuture`; `worker.Worker` is what a worker
inherits from. Imports `channels`, `messages`, `directory`, `placement` and `errors`.
"""
