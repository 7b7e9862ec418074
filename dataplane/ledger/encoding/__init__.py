"""The ledger as bytes: the state image, the journal's records, and the fingerprint that compares two states."""
