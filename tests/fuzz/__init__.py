"""Every decoder, fed with damaged and hostile bytes: fixed examples by pytest, as many as wanted by `make fuzz`."""
