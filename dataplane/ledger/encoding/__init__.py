"""Encodings of the ledger: the state image, the journal's records, and the fingerprint for comparing two states."""
