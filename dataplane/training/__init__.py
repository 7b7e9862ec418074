"""What a training loop uses on top of the client.

A streaming data loader, a replay buffer, staleness policies and dynamic sampling; only public calls of the client.
"""
