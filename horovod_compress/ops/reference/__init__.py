"""Every operation again, in slow and readable NumPy: what the compiled ones must equal bit for bit.

``HVC_KERNELS=reference`` runs everything on these. They take what the operations take for one tensor, of which the
legality is checked already. A module here has the name of the one beside which it stands; this package has the
functions of all.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import FunctionType

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]


def __getattr__(name: str) -> FunctionType:
    """Return a function of one of the modules."""
    for module in _MODULES:
        found = vars(module).get(name)
        if isinstance(found, FunctionType):
            return found
    raise AttributeError(f"no reference has a function {name!r}")
