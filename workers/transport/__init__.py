"""Transport between the processes of a job, used by the directory, messages and channels.

There are two kinds of connections. ZMQ (`zmq_sockets`, `links`) serves many peers whose connections come and go;
ZMQ's threads reconnect and send heartbeats. Streams (`stream`, `stream_server`) serve a caller that talks to one
server from its own thread and reads directly into its memory. A `PollThread` serves both. Messages are msgpack of
known types (`encoding`). Values are a layout and runs of bytes (`pickling`).

Imports `workers.errors` and `dataplane`; only `pickling` imports torch. Start reading at `poll_thread`.
"""
