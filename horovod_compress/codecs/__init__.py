"""The mathematics of each method: numbers to bytes and back. One file per method.

What a method makes of a bucket belongs here, and nothing of how it travels. What methods share is in :mod:`.shared`,
what they are to be in :mod:`.base`. A new codec is a new file: every module of this package is imported here, and
registers itself.
This happens here and not in :mod:`.registry`, so that any of them may be imported first.
"""

from .registry import import_all as _import_all

_import_all(__name__, __path__)
