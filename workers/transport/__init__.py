"""What crosses between the processes of a job: the directory, messages and channels send and receive by it.

Two carriers, as their users need different things of the kernel: ZMQ (`zmq_sockets`, `links`) for many peers whose
connections come and go beside Python, heartbeats included, and streams (`stream`, `stream_server`) for a caller that
speaks to one server from its own thread and reads straight into its memory. Both are served by a `PollThread`. Messages
are msgpack of known types (`encoding`), and values are a layout and runs of bytes (`pickling`).

Imports `workers.errors` and `dataplane`; torch is imported by `pickling` only. Start reading at `poll_thread`.
"""
