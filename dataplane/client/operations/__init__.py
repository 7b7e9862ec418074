"""The client's operations as generators of steps (`steps`), without sockets. A test steps one by hand."""
