"""Calls to the controller: sessions, call ids, deadlines, resends, heartbeats.

`channel` executes calls from threads, `async_channel` from an event loop. Start with `channel`.
"""
