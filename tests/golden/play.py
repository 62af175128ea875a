"""Golden runs: inputs that have the same bits everywhere, and hashes of what is made of them."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_compress import ops
from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.battery.kept import kept
from tests.support.local import Fleet, all_same
from tests.support.samples import samples

WORLD = 3
DTYPES = ("float32", "float64", "float16", "bfloat16")
_BITS = (1 << 32) - 1
#: With vectors of eight numbers or more, torch's own kernels round alike, but for their :class:`Roots`.
TORCH_ROUNDS_ALIKE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class Roots(TorchDispatchMode):
    """Lets torch's optimizers take square roots that are right: those of MKL depend on the kind of the processor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return ops.take_roots(args[0].clone())
        if func is torch.ops.aten.sqrt_.default:
            return ops.take_roots(args[0])
        if func is torch.ops.aten._foreach_sqrt.default:
            return [ops.take_roots(values.clone()) for values in args[0]]
        assert "sqrt" not in func.name(), f"{func.name()} would take roots of torch's own"
        return func(*args, **(kwargs or {}))


def tensors(dtype: str = "float32") -> list[TensorSpec]:
    """Return an odd mix: less than a word, a word and one more, nothing, one element, a row, matrices, a kernel."""
    shapes = {"bias": (33,), "kernel": (3, 2, 5, 7), "none": (0,), "one": (1,), "scalar": (), "wide": (2, 300),
              "tall": (130, 3), "row": (64,)}  # fmt: skip
    return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


def numbers(spec: TensorSpec, *place: int) -> Tensor:
    """Return numbers from -64 to 64, most of them small and some 0 of either sign, made of integers alone.

    Args:
        place: such as step, rank and position; other places have other numbers.
    """
    bits = torch.arange(1, spec.count + 1, dtype=torch.int64)
    for number in (*place, 1):
        bits = (bits * 2654435761 + number * 40503 + 1) & _BITS
        bits = ((bits ^ bits >> 15) * 2246822519) & _BITS
        bits ^= bits >> 13
    root = ((bits >> 16) - (1 << 15)).double()
    found = root * root.abs() / (1 << 24)
    found[bits & 31 == 0], found[bits & 31 == 1] = 0.0, -0.0
    return found.to(getattr(torch, spec.dtype)).view(spec.shape)


def grads(step: int, specs: Sequence[TensorSpec], world: int = WORLD) -> list[dict[str, Tensor]]:
    """Return gradients per rank, by name."""
    return [{t.name: numbers(t, step, rank, at) for at, t in enumerate(specs)} for rank in range(world)]


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of tensors and their names."""
    found = hashlib.blake2b(digest_size=6)
    for name, tensor in named:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest_of_all(each: Iterable[Mapping[str, Tensor]]) -> str:
    """Return a hash of every rank's tensors by name."""
    return digest((f"{rank} {name}", mine[name]) for rank, mine in enumerate(each) for name in sorted(mine))


def lines(document: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry, sorted."""
    entries = [f"{json.dumps(name)}: {json.dumps(document[name], sort_keys=True)}" for name in sorted(document)]
    return "{\n" + ",\n".join(entries) + "\n}\n"


# ---- runs ----

STEPS, MIDDLE = 6, 3
TENSORS = tensors()
#: The first sample of each method.
FIRST = [sample for sample in samples() if sample.number == 0]

Step = Callable[[int], list[dict[str, Tensor]]]
Found = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One case.

    Attributes:
        play: returns what every version has to find.
        quick: `make test` plays it.
        by_torch: torch's own arithmetic is in it, which is another one on processors without AVX2.
    """

    play: Callable[[], Found]
    quick: bool = False
    by_torch: bool = False


def two_buckets(dtype: str = "float32", plain: bool = False) -> Plan:
    specs = tensors(dtype)
    return Plan.of([(specs[:4], 1), (specs[4:], 1, plain)])


def played(fleet: Fleet, step: Step | None = None, dtype: str = "float32") -> Found:
    """Return what came of some steps: results, all that is kept, and what was counted.

    Args:
        step: returns the results of a step; None for the usual gradients.
    """
    results = []
    for number in range(STEPS):
        made = step(number) if step else fleet.step(grads(number, tensors(dtype), fleet.world))
        assert all_same(made)
        results.append(digest_of_all(made))
    return {"results": results} | what_is_left(fleet)


def what_is_left(fleet: Fleet) -> Found:
    """Return hashes of all that ranks keep, by kind, and their counters."""
    assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
    kinds: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for rank, mine in enumerate(kept(fleet)):
        for name, tensor in sorted(mine.items()):
            kinds[name.split()[0]].append((f"{rank} {name}", tensor))
    for rank, reducer in enumerate(fleet.reducers):
        for name, tensor in sorted(reducer.kept.withholding.waiting().items()):
            kinds["waiting"].append((f"{rank} {name}", tensor))
    all_, first = [reducer.metrics for reducer in fleet.reducers], fleet.reducers[0].metrics
    sent = {
        "all": sum(m.bytes_sent for m in all_),
        "exact": sum(m.bytes_exact for m in all_),
        "compressed": sum(m.bytes_compressed for m in all_),
    }
    counted = {name: getattr(first, name) for name in ("steps", "exact_steps", "nonfinite", "verified")}
    return {"kept": {kind: digest(those) for kind, those in kinds.items()}, "sent": sent, "counted": counted}
