"""Building Horovod for the torch that is there. Only the standard library: it runs before anything is installed."""
