"""Runs PyTorch's own tests of ``fully_shard`` on CPUs, with or without a compression of ours between replicas.

PyTorch's wheel lacks these tests, so they come from a checkout of its sources, which the environment names. Their
ranks are processes that are forked from this one, over Gloo. With a compression, half of the ranks are one replica and
half another: a model that a test divides among all ranks is divided among those of a replica, one that it divides and
replicates is replicated by us, and ``none`` exchanges what torch would have.

As a program it reads JSON lines ``{"name": "FILE.CLASS.TEST", "ours": ..., "ranks": ...}`` and answers each with
``{"outcome": ..., "text": ..., "models": ..., "steps": ...}``. Its environment is
:data:`tests.parallel.test_torch_fsdp_suite.ENVIRONMENT`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import unittest
import weakref
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it at their first use
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch.utils._python_dispatch import _disable_current_modes

import horovod_compress.fsdp as hvc
from tests.support.cpu_as_gpus import CPU, stand_in
from tests.support.suites import answer, outcome

FOLDER = "test/distributed/_composable/fsdp"
PREFIX = "test_fully_shard_"
SECONDS = float(os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"])
#: Of a model that a test divides among all ranks.
REPLICAS = 2
#: That there seem to be: many tests take a rank for each.
GPUS = 4


class Between:
    """Puts a compression between the replicas of every model that a test divides and calls, in a rank's process."""

    def __init__(self) -> None:
        self._grids: dict[int, DeviceMesh] = {}
        self._divided: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._made: list[hvc.Compression] = []
        self._inside = False
        self._replace_fully_shard()
        self._watch_optimizers()
        self._watch_calls()

    def _replace_fully_shard(self) -> None:
        @wraps(fully_shard)
        def ours(module: Any, *, mesh: DeviceMesh | None = None, **options: Any) -> Any:
            replicate, shard = self._dimensions(mesh)
            for one in module if isinstance(module, (list, tuple)) else [module]:
                self._divided[one] = replicate
            return fully_shard(module, mesh=shard, **options)

        for found in [*sys.modules.values()]:
            for name in [name for name, value in vars(found).items() if value is fully_shard]:
                if found is not sys.modules[__name__]:
                    setattr(found, name, ours)

    def _dimensions(self, mesh: DeviceMesh | None) -> tuple[DeviceMesh, DeviceMesh]:
        """Return along what we replicate, and along what torch divides."""
        if mesh is not None and mesh.ndim == 2 and mesh.mesh_dim_names:
            return mesh[mesh.mesh_dim_names[0]], mesh[mesh.mesh_dim_names[1]]
        world = dist.get_world_size()
        if mesh is not None and (mesh.ndim > 1 or mesh.size() < world):
            raise NotImplementedError(f"a model divided along {mesh} has no place in a grid of {world} ranks")
        if world not in self._grids:
            replicas = 1 if world % REPLICAS else REPLICAS
            shape = (replicas, world // replicas)
            self._grids[world] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        return self._grids[world]["replicate"], self._grids[world]["shard"]

    def _watch_optimizers(self) -> None:
        construct = torch.optim.Optimizer.__init__

        def remembered(optimizer: Any, *given: Any, **named: Any) -> None:
            construct(optimizer, *given, **named)
            self._optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = remembered  # type: ignore[method-assign]

    def _watch_calls(self) -> None:
        call = nn.Module.__call__

        def registered(module: nn.Module, *given: Any, **named: Any) -> Any:
            if self._inside:
                return call(module, *given, **named)
            with _disable_current_modes():  # else a test that counts what torch sends counts what register() does
                self._register(module)
            self._inside = True
            try:
                return call(module, *given, **named)
            finally:
                self._inside = False

        nn.Module.__call__ = registered  # type: ignore[method-assign, assignment]

    def _register(self, model: nn.Module) -> None:
        """Give a compression to what a test calls, if it was divided and has none."""
        meshes = [self._divided[one] for one in model.modules() if one in self._divided]
        if not meshes:
            return
        for one in [one for one in model.modules() if one in self._divided]:
            del self._divided[one]
        ours = {id(parameter) for parameter in model.parameters()}
        optimizers = [
            optimizer
            for optimizer in self._optimizers
            if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
        ]
        compression = hvc.Compression.none(model.named_parameters(), timeout=SECONDS / 2)
        compression.register(model, optimizers or None, replicate=meshes[0])
        self._made.append(compression)

    def close(self) -> dict[str, int]:
        """Close all compressions; return how many there were, and how many steps they have exchanged."""
        steps = sum(compression.stats()["steps"] for compression in self._made)
        for compression in self._made:
            compression.close()
        return {"models": len(self._made), "steps": steps}


class Asked:
    """What the processes of a test are to do; they are forked, and so know it."""

    ours = False
    counts: Path


def let_them_run() -> None:
    """Let tests of PyTorch's harness run here: on CPUs, in processes that are forked."""
    run_test = MultiProcessTestCase.run_test

    def run(test: Any, test_name: str, parent_pipe: Any) -> None:
        with stand_in(GPUS):
            if not Asked.ours:
                run_test(test, test_name, parent_pipe)
                return
            between = Between()
            try:
                run_test(test, test_name, parent_pipe)
            finally:
                Asked.counts.with_suffix(f".{test.rank}").write_text(json.dumps(between.close()))

    def fork(test: Any) -> None:
        test._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase.run_test = run  # type: ignore[method-assign]
    MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]
    torch.accelerator.device_count = lambda: sys.maxsize  # FSDPTest skips where there are fewer than ranks
    torch.accelerator.current_accelerator = lambda check_available=False: CPU
    torch.cpu.device_count = torch.cuda.device_count = lambda: GPUS


def tests(sources: Path) -> Iterator[tuple[str, tuple[type[Any], str]]]:
    """Yield the class and the method of all tests of the sources, by their names."""
    for path in sorted((sources / FOLDER).glob(f"{PREFIX}*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == path.stem:
                for test in unittest.defaultTestLoader.getTestCaseNames(kind):
                    yield f"{path.stem.removeprefix(PREFIX)}.{name}.{test}", (kind, test)


def main() -> None:
    let_them_run()
    found = dict(tests(Path(os.environ["HVC_TEST_TORCH_SOURCES"])))

    def run(name: str, ours: bool, ranks: int | None, folder: Path) -> dict[str, Any]:
        if name not in found:
            return {"outcome": "absent", "text": f"the sources have no {name}"}
        Asked.ours, Asked.counts = ours, folder / "rank"
        kind, test = found[name]
        if ranks:
            kind = type(kind.__name__, (kind,), {"world_size": ranks})
        made = kind(test)
        return outcome(made, folder, made.world_size if ours else 0)

    answer(lambda: {name: issubclass(kind, MultiThreadedTestCase) for name, (kind, _) in found.items()}, run)


if __name__ == "__main__":
    main()
