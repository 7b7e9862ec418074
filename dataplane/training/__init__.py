"""Training-loop components on top of the client: a streaming data loader, a replay buffer, staleness policies and
dynamic sampling.

They use only public calls of the client.
"""
