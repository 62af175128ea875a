"""Building Horovod for the torch that is there; only the standard library, as this runs before anything is installed."""
