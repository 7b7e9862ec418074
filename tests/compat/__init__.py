"""The same scripts against other packages and against this one's adapters of their interfaces."""
