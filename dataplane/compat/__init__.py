"""Other packages' interfaces over this service, for frameworks that were written for those.

`transfer_queue`: the module of that name. `nemo_rl`: NeMo-RL's data plane client. `discovery`: how their processes
find the service. `switch`: those modules in the place of the originals, in code that is not edited; `starting`: the
command that turns it on.
"""
