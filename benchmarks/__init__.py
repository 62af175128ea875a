"""Benchmarks: kernels, all-reduce and training; each module has `main(argv) -> exit status`."""
