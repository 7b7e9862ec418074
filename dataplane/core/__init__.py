"""Words and operating-system helpers that every package uses.

Field types and standard names, addresses, file locks, fsync, memory limits, row copies, checksums and failpoints. A
file does one thing and knows nothing of samples. Imports `errors` and nothing else of the project. Start with `types`
and `schema`.
"""
