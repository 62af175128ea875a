"""What the Horovod of this installation is, and what it was built with."""

from __future__ import annotations


def version() -> str:
    """Return the version of Horovod."""
    import horovod

    return str(horovod.__version__)


def load_library() -> None:
    """Load Horovod's library for PyTorch.

    Without it ``horovod.torch`` imports all the same, and prints why it will not work.

    Raises:
        ImportError: there is none.
    """
    import torch  # noqa: F401, I001  first: Horovod's library refers to its own
    import horovod.torch.mpi_lib_v2  # noqa: F401


def controllers() -> dict[str, bool]:
    """Return which controllers were built."""
    import horovod.torch as hvd

    return {"Gloo": bool(hvd.gloo_built()), "MPI": bool(hvd.mpi_built())}


def has_nccl() -> bool:
    """Return whether Horovod's own all-reduce can use NCCL."""
    import horovod.torch as hvd

    return bool(hvd.nccl_built())


def has_cuda() -> bool:
    """Return whether Horovod knows tensors on GPUs."""
    import horovod.torch as hvd

    return bool(hvd.cuda_built())
