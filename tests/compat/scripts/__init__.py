"""Scripts of users of the TransferQueue package. Each is given the module and what `init` returned, uses nothing else
of either package, and returns what it saw as plain values and tensors. POLLING and `sampler` say what service it
wants."""
