"""What moves bytes: ``gloo`` between processes, ``nccl`` between GPUs, ``local`` between threads of one process."""
