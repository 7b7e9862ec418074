"""Groups of workers on Ray: placement, start, calls to all workers, and results.

`worker_group.WorkerGroup` and `ray_worker_group.RayWorkerGroup` are the two interfaces. `started_group` has what both
hold, a `StartedGroup`, and how both wait for results, a `GroupFuture`. `worker.Worker` is the base class of
workers. This package imports `channels`, `messages`, `directory`, `placement` and `errors`.
"""
