"""A bounded HTTP server, and the authentication of its requests."""
