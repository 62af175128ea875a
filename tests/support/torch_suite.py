"""Runs PyTorch's own tests of DistributedDataParallel on CPUs, with or without a compression of ours in every model.

PyTorch's wheel has these tests, in ``torch.testing``. They run in its own harness, on two ranks, which are forked from
this process: it has imported everything once. As a program it reads JSON lines ``{"name": ..., "ours": ...,
"late": ...}`` and answers each with ``{"outcome": ..., "text": ..., "models": ..., "steps": ...}``. Its environment is
:data:`tests.parallel.test_torch_suite.ENVIRONMENT`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it at their first use
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import distributed_test

import horovod_compress.ddp as hvc
from tests.support.cpu_as_gpus import stand_in
from tests.support.suites import answer, outcome

WORLD = int(os.environ["WORLD_SIZE"])
SECONDS = float(os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"])
_TESTS: Any = distributed_test.DistributedTest._DistTestBase


class Registering:
    """Gives a compression to every model that is wrapped.

    Args:
        late: wait for the first forward pass, and leave models alone that have a hook by then.
    """

    def __init__(self, late: bool) -> None:
        self._made: dict[int, tuple[Any, hvc.Compression]] = {}
        when = "forward" if late else "__init__"
        inner = getattr(DistributedDataParallel, when)

        def early(model: Any, *given: Any, **named: Any) -> None:
            inner(model, *given, **named)
            self._register(model)

        def before_forward(model: Any, *given: Any, **named: Any) -> Any:
            if not model._comm_hooks:
                self._register(model)
            return inner(model, *given, **named)

        setattr(DistributedDataParallel, when, before_forward if late else early)

    def _register(self, model: Any) -> None:
        named = [(n, p) for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore]
        compression = hvc.Compression.none(named, process_group=model.process_group, timeout=SECONDS / 2)
        self._made[id(model)] = (model, compression)
        compression.register(model)

    def close(self) -> dict[str, int]:
        """Close all compressions; return how many there were, and how many steps they have exchanged."""
        compressions = [compression for _, compression in self._made.values()]
        steps = sum(compression.stats()["steps"] for compression in compressions)
        for compression in compressions:
            compression.close()
        return {"models": len(compressions), "steps": steps}


class TorchSuite(distributed_test.TestDistBackend, _TESTS):
    """PyTorch's tests, in processes that are forked."""

    ours, late = False, False
    counts: Path

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Run a test in the process of a rank."""
        with stand_in(WORLD):
            if not self.ours:
                super().run_test(test_name, parent_pipe)
                return
            registering = Registering(self.late)
            try:
                super().run_test(test_name, parent_pipe)
            finally:
                self.counts.with_suffix(f".{self.rank}").write_text(json.dumps(registering.close()))


def about_ddp() -> list[str]:
    """Return the names of the tests that wrap a model, themselves or in a method that they call."""
    methods = {name: inspect.unwrap(method) for name, method in inspect.getmembers(_TESTS, inspect.isfunction)}
    sources = {name: inspect.getsource(method) for name, method in methods.items()}

    def wraps(name: str, seen: frozenset[str] = frozenset()) -> bool:
        source = sources[name]
        if "DistributedDataParallel(" in source or "DDP(" in source:
            return True
        called = set(re.findall(r"self\.(\w+)\(", source)) & sources.keys() - seen - {name}
        return any(wraps(other, seen | {name}) for other in called)

    return sorted(name for name in methods if name.startswith("test") and wraps(name))


def run(name: str, ours: bool, late: bool, folder: Path) -> dict[str, Any]:
    """Run a test; see :func:`tests.support.suites.outcome`."""
    if not hasattr(TorchSuite, name):
        return {"outcome": "absent", "text": f"torch {torch.__version__} has no such test"}
    TorchSuite.ours, TorchSuite.late, TorchSuite.counts = ours, late, folder / name
    return outcome(TorchSuite(name), folder, WORLD)


if __name__ == "__main__":
    answer(about_ddp, run)
