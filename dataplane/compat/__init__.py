"""Interfaces of other packages, implemented on this service for frameworks that were written for those packages.

`transfer_queue` implements the module of that name. `nemo_rl` implements NeMo-RL's data plane client. `discovery`
finds the service from other processes. `switch` replaces the original modules in unedited code, and starts
programs with the switch on.
"""
