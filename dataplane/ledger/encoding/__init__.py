"""Encodings of the ledger: the state image and the journal's records."""
