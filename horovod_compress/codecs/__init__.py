"""The mathematics of each method: numbers to bytes and back. One file per method.

A new codec is a new file: every module of this package is imported here, and registers itself.
This happens here and not in :mod:`.registry`, so that any of them may be imported first.
"""

from .registry import import_all as _import_all

_import_all()
