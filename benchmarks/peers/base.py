"""What a contestant of the benchmarks is: a name, and a way to get its gradients reduced.

A further contestant is a file of the user's own, given as ``--peer FILE``, that defines
``adapters() -> list[Adapter]``. It may import what it likes; this project contains none of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from .names import PeerError

#: How a result is judged: against the mean within float32 or float16 rounding, only by being
#: finite and the same bits on every rank (compressed), or not at all (nothing was exchanged).
Check = Literal["float32", "float16", "identical", "none"]
CHECKS = ("float32", "float16", "identical", "none")


class Adapter(Protocol):
    """One contestant.

    Beside these, an adapter may have

    - ``allreduce(tensor) -> None``: a blocking mean over ranks, in place;
    - ``stats() -> dict``: counters since ``wrap``, at least ``bytes_sent`` (of this rank) and
      ``seconds`` (per phase; ``exchange`` is the one that is compared); ``bytes_computed`` is true
      where the bytes are not counted but follow from the sizes;
    - ``exchange_alone() -> None``: an exchange of the payload without encoding and decoding it,
      between two steps;
    - ``close() -> None``: let go of connections and buffers, between two steps;
    - ``check``: one of ``CHECKS``, "identical" if it is missing;
    - ``warm_up``: how many steps it needs until it works as it goes on;
    - ``settled() -> bool``: whether it has found what it looks for during the first training steps. They go on until
      it has.
    """

    name: str  #: unique in a run, e.g. "horovod fp32"

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Return what is trained instead of these two.

        Afterwards ``loss = model(x); loss.backward(); optimizer.step()`` makes a step, and every
        gradient is reduced when ``step`` of the given optimizer runs.
        """
        ...


def load(path: str | Path) -> list[Adapter]:
    """Return the contestants of a file.

    Raises:
        PeerError: names the file and what is wrong with it, such as the import that failed.
    """
    path = Path(path)
    make = getattr(_module(path), "adapters", None)
    if not callable(make):
        raise PeerError(f"{path}: a peer file defines adapters() -> list of adapters; this one does not")
    try:
        found = list(make())
    except ImportError as error:
        raise PeerError(_missing(path, error)) from error
    except Exception as error:
        raise PeerError(f"{path}: adapters() failed: {type(error).__name__}: {error}") from error
    for adapter in found:
        _check_adapter(path, adapter)
    return cast("list[Adapter]", found)


def _module(path: Path) -> object:
    if not path.is_file():
        raise PeerError(f"{path}: there is no such peer file")
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PeerError(f"{path}: a peer file is a Python file, with a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise PeerError(_missing(path, error)) from error
    except Exception as error:
        raise PeerError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def _missing(path: Path, error: ImportError) -> str:
    what = error.name or "an import"
    return f"{path} needs {what}, which cannot be imported here ({error}); install it on every host"


def _check_adapter(path: Path, adapter: object) -> None:
    name = getattr(adapter, "name", None)
    if not isinstance(name, str) or not name:
        raise PeerError(f"{path}: an adapter has a name, a text that is not empty; got {name!r}")
    if not callable(getattr(adapter, "wrap", None)):
        raise PeerError(f"{path}: adapter {name!r} has no wrap(model, optimizer)")
    if check_of(cast(Adapter, adapter)) not in CHECKS:
        raise PeerError(f"{path}: check of adapter {name!r} should be one of {', '.join(CHECKS)}")


# ---- the optional parts -----------------------------------------------------------------------


def check_of(adapter: Adapter) -> Check:
    return getattr(adapter, "check", "identical")


def warm_up_of(adapter: Adapter, least: int) -> int:
    return max(least, int(getattr(adapter, "warm_up", 0)))


def settled(adapter: Adapter) -> bool:
    ask = getattr(adapter, "settled", None)
    return ask is None or bool(ask())


def allreduce_of(adapter: Adapter) -> Callable[[Tensor], None] | None:
    return getattr(adapter, "allreduce", None)


def exchange_of(adapter: Adapter) -> Callable[[], None] | None:
    return getattr(adapter, "exchange_alone", None)


def stats_of(adapter: Adapter) -> dict[str, Any]:
    """Return the adapter's counters, empty where it has none."""
    stats = getattr(adapter, "stats", None)
    return stats() if stats else {}


def close(adapter: Adapter) -> None:
    if end := getattr(adapter, "close", None):
        end()


def ring_bytes(payload: float, world: int) -> int:
    """Return what one rank of a ring all-reduce sends of a payload of so many bytes."""
    return round(2 * (world - 1) / world * payload)
