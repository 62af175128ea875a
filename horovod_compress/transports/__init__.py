"""What moves bytes: ``gloo`` between processes, ``local`` between threads of one process."""
