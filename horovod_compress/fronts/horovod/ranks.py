"""Horovod's ranks, for the commands that check and measure: ``verify``, ``headroom`` and ``plan --measure``.

As a module, it is a rank that ``verify`` has started itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...engine.job import Gathering
from ...engine.tuning import costs_of, costs_over_ranks, plain_costs
from ...errors import ConfigError
from ...known import MethodName
from ...planner import comparison
from ...planner.comparison import Trial
from ...planner.predictions import Case, predicted
from ...planner.synthetic import TILE, Gradients, Pace, SyntheticModel, calibrate, untouched_memory
from ...schedule.plan import Plan
from ...schedule.watch import Watch
from .. import local_ranks, selftest
from ..local_ranks import End, Look
from ..ranks import PATIENCE, Training
from ..startup import Wrap, as_it_is
from .compression import Compression
from .job import HorovodJob

_MODULE = "horovod_compress.fronts.horovod.ranks"
_LR = 0.01
_WARM_UP = 2
_TIMEOUT_SECONDS = 600.0  # a slow link is no failure here


def begin() -> HorovodRanks:
    """Start Horovod for a command: one rank where no launcher has started several."""
    hvd.init()
    return HorovodRanks()


class HorovodRanks:
    """The ranks of a Horovod job, which has to run."""

    name = "horovod"

    @property
    def rank(self) -> int:
        return int(hvd.rank())

    @property
    def size(self) -> int:
        return int(hvd.size())

    def gather(self, value: Any, name: str) -> list[Any]:
        return HorovodJob(hvd.global_process_set).gather(value, Gathering(name, PATIENCE))

    def barrier(self) -> None:
        hvd.barrier()

    def slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        return float(hvd.allreduce(mine, name="ranks.seconds", op=hvd.Max))

    def mean(self, tensor: Tensor) -> None:
        hvd.allreduce_(tensor, name="ranks.fp32")

    def mean_in_fp16(self, tensor: Tensor) -> None:
        payload, _ = hvd.Compression.fp16.compress(tensor)
        tensor.copy_(hvd.allreduce_(payload, name="ranks.fp16"))

    def train(self, model: nn.Module, method: MethodName, wrap: Wrap = as_it_is, **options: Any) -> Training:
        named = list(model.named_parameters())
        compression = Compression(method, named, options, HorovodJob(hvd.global_process_set), wrap)
        plain = torch.optim.SGD(model.parameters(), lr=_LR)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
        return Training(compression, compression.attach(optimizer), model)

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        parameter.grad = grad
        training.optimizer._synchronized = False  # the step() that would follow is not measured
        training.optimizer.synchronize()


def run_local(
    world: int, what: Any, seconds: float, victims: Collection[int] = (), look: Look = lambda left: None
) -> list[End]:
    """Run this module as every rank of a job on this machine; see :func:`.local_ranks.run`.

    Only the server through which ranks find each other is taken from Horovod's launcher.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    plan = get_host_assignments(parse_hosts(f"localhost:{world}"), world)
    common = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(plan)
    try:
        own = [{key: str(value) for key, value in (common | create_slot_env_vars(slot)).items()} for slot in plan]
        return local_ranks.run(_MODULE, own, what, seconds, victims, look)
    finally:
        server.stop()
        server._httpd.server_close()  # which stop() leaves to the garbage collector


# ---- steps of a stand-in model in a real job, beside what was predicted of them ----


@dataclass(frozen=True)
class _Trials:
    """What rank 0 tells the others: the plans to try, or why there are none."""

    plans: list[tuple[str, list[dict[str, Any]]]]
    problem: str = ""


def compare(case: Case, codec: Codec, repeat: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Predict and take steps with every schedule; return both. Every rank has to call this, after ``hvd.init()``.

    Raises:
        ConfigError: the method cannot serve this world or this model.
    """
    said = tell if hvd.rank() == 0 else lambda text: None
    said(f"measuring the codec of {codec.name} on this machine")
    asked = _Trials(**_share(asdict(_ask(case, codec)) if hvd.rank() == 0 else None, "plan.asked")[0])
    if asked.problem:
        raise ConfigError(asked.problem)
    torch.set_num_threads(1)
    bench = _Bench(case, codec, repeat)
    said(f"measuring steps of {case.table.model} that exchange nothing, on {hvd.size()} ranks")
    t1 = calibrate(bench.pace, bench.bare_step)
    trials = []
    for schedule, document in asked.plans:
        plan = Plan.from_document(document)
        said(f"measuring schedule {schedule}: {len(plan.buckets)} bucket(s), {repeat} steps")
        trials.append(bench.trial(schedule, plan))
    # What is predicted, with the compute that was taken.
    measured = replace(case, compute=t1)
    return comparison.document(measured, predicted(measured, codec), trials) if hvd.rank() == 0 else {}


def _share(value: Any, name: str) -> list[Any]:
    """Return every rank's value."""
    return HorovodJob(hvd.global_process_set).gather(value, Gathering(f"hvc.{name}", _TIMEOUT_SECONDS))


def _ask(case: Case, codec: Codec) -> _Trials:
    try:
        found = predicted(case, codec)
        return _Trials([(one.schedule, one.plan.document()) for one in found.timelines])
    except ConfigError as error:  # told to every rank, which raises it
        return _Trials([], str(error))


class _NullOptimizer(torch.optim.Optimizer):
    """Changes nothing, so that a step is compute and exchange and nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class _Bench:
    """The stand-in that all schedules are measured with."""

    def __init__(self, case: Case, codec: Codec, repeat: int) -> None:
        self._case, self._codec, self._repeat = case, codec, repeat
        self.pace = Pace(case.compute)
        size = min(TILE, case.table.count)
        tile = torch.randn(size, generator=torch.Generator().manual_seed(hvd.rank()))
        self._gradients = Gradients(case.table, tile)
        self._memory = untouched_memory(case.table.count)
        self._bare = self._model()

    def _model(self) -> SyntheticModel:
        return SyntheticModel(self._case.table, self._gradients, self.pace, self._memory)

    def bare_step(self) -> float:
        """Take a step without exchange; return its seconds on the slowest rank."""
        return self._step(self._bare, lambda: None)

    def _step(self, model: SyntheticModel, end: Callable[[], object]) -> float:
        for parameter in model.parameters():
            parameter.grad = None
        self._gradients.refill()
        hvd.barrier()
        began = time.perf_counter()
        model(torch.zeros(1)).backward()
        end()
        mine = time.perf_counter() - began
        return max(_share(mine, "plan.step"))

    def trial(self, schedule: str, plan: Plan) -> Trial:
        """Return what the steps with some buckets took."""
        model = self._model()
        named = list(model.named_parameters())
        options: dict[str, Any] = {"schedule": plan, "exchange": self._case.world.exchange, "timeout": _TIMEOUT_SECONDS}
        compression = Compression.create(self._codec, named, **options)
        wrapped = hvd.DistributedOptimizer(_NullOptimizer(model.parameters()), named, compression=compression)
        optimizer = compression.attach(wrapped)
        for _ in range(_WARM_UP):
            self._step(model, optimizer.step)
        reducer = compression._here().reducer
        reducer.context.watch = watch = Watch(reducer.plan)
        before = compression.stats()["bytes_sent"]
        seconds = [self._step(model, optimizer.step) for _ in range(self._repeat)]
        sent = (compression.stats()["bytes_sent"] - before) / self._repeat
        buckets = costs_over_ranks([costs_of(costs) for costs in _share(plain_costs(watch.buckets()), "plan.buckets")])
        hvd.barrier()  # nobody closes while another rank is still under way
        compression.close()
        first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return Trial(schedule, plan, middle, (first, third), sent, tuple(buckets.values()))


if __name__ == "__main__":
    selftest.serve(begin)
