"""Gradient compression for Horovod: one argument to the stock optimizer, a ring of packed bytes.

Import :mod:`horovod_compress.torch`; this package itself imports neither torch nor Horovod.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("horovod-compress")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
