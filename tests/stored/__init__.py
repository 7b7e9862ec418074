"""A service as an earlier commit stored it, which every later one reads: see `build` and `test_stored`."""
