"""Calls to the controller: sessions, numbered commands, deadlines, resends, heartbeats.

`channel` executes calls from threads, `async_channel` from an event loop. Start with `channel`.
"""
