"""A bounded HTTP server, and what authenticates its requests."""
