"""Gradient compression for PyTorch's DistributedDataParallel and for Horovod.

Import :mod:`horovod_compress.ddp` or :mod:`horovod_compress.torch`; this package itself imports neither torch nor
Horovod.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("horovod-compress")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Find what has another name now."""
    if name != "kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    from . import ops

    warnings.warn(f"{__name__}.kernels is {__name__}.ops now", DeprecationWarning, stacklevel=2)
    return ops
