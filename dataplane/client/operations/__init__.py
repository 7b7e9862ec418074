"""The client's operations as generators of steps (`steps`), without sockets. Unit tests execute them step by step."""
