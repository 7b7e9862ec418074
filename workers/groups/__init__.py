"""Groups of workers on Ray: placement, start, calls to all workers, and results.

`worker_group.WorkerGroup` and `ray_worker_group.RayWorkerGroup` are the two interfaces. Both hold a
`started_group.StartedGroup` and wait for results with a `futures.GroupFuture`. `worker.Worker` is the base class of
workers. This package imports `channels`, `messages`, `directory`, `placement` and `errors`.
"""
