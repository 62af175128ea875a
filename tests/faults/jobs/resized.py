"""An elastic job whose hosts change, or one of whose ranks is killed. Gradients are known: no model makes them.

Several models train side by side, each with a method of its own. Weights are moved by plain SGD at a rate of 1, so what
they have lost is the sum of all results.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import elastic
from torch import Tensor

import horovod_compress.torch as hvc
from horovod_compress.fronts.horovod.resets import Resets

case: dict[str, Any] = json.loads(os.environ["HVC_TEST_ARGUMENTS"])
folder = Path(os.environ["HVC_TEST_FOLDER"])
PAUSE = 0.05
#: For so long ranks wait for word of other hosts.
PATIENCE = 60.0
#: So many steps pass after ranks began to train before one is killed in a step.
STEPS_BETWEEN = 3


def fresh() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(33, 64), torch.nn.Linear(64, 5))


def grads_of(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(p.shape, generator=generator) for name, p in shapes.items()}


def mean_of(step: int, world: int) -> dict[str, Tensor]:
    each = [grads_of(step, rank) for rank in range(world)]
    return {name: torch.stack([grads[name].double() for grads in each]).mean(dim=0) for name in each[0]}


class Trained:
    """A model, its compression and its optimizer.

    Args:
        asked: method (None for Horovod alone), path ("attached", "stock" or "update"), options, sum (of results instead
            of the mean), optimizer, given (its options), attach and updates (options).
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.model = fresh()
        self.path = asked.get("path", "attached")
        self.op = hvd.Sum if asked.get("sum") else hvd.Average
        named = list(self.model.named_parameters())
        options = {"timeout": 30.0, "verify_every": 1} | asked.get("options", {})
        self.compression: Any = hvd.Compression.none
        if asked["method"]:
            self.compression = hvc.Compression.create(asked["method"], named, **options)
        compression = self.compression
        kind = getattr(torch.optim, asked.get("optimizer", "SGD"))
        plain = kind(self.model.parameters(), lr=1.0 if kind is torch.optim.SGD else 1e-3, **asked.get("given", {}))
        if self.path == "update":
            self.optimizer = hvc.DistributedUpdateOptimizer(plain, named, compression, **asked.get("updates", {}))
            return
        self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression, op=self.op)
        if self.path == "attached" and asked["method"]:
            compression.attach(self.optimizer, **asked.get("attach", {}))

    def step(self, grads: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        sum((p * grads[name]).sum() for name, p in self.model.named_parameters()).backward()
        self.optimizer.step()

    def end(self, state: Any) -> dict[str, Any]:
        """Return how far the sums are apart: all that was offered, what has moved weights, and what waits."""
        if self.compression is hvd.Compression.none:
            return {"weights": self.hash()}
        if self.path == "update":
            self.optimizer.flush()
        offered = state.summed if self.op == hvd.Sum else state.offered
        kept = self.compression._here().reducer.kept
        waits = {n: hvd.allreduce(r.double(), name=f"waits.{n}", op=self.op) for n, r in kept.residuals().items()}
        for name, kept_of_mean in kept.states().get("server", {}).items():  # each element's owner has it
            times = hvd.size() if self.op == hvd.Sum else 1  # it is an error of the mean
            waits[name] += times * hvd.allreduce(kept_of_mean.double(), name=f"server.{name}", op=hvd.Sum)
        sign = -1.0 if self.path == "update" else 1.0  # there it is updates of weights that wait
        apart = 0.0
        for (name, before), after in zip(fresh().named_parameters(), self.model.parameters(), strict=True):
            owed = waits[name].view_as(before) if name in waits else 0.0
            apart = max(apart, float(((before - after).detach() + sign * owed - offered[name]).abs().max()))
        return {"weights": self.hash(), "apart": apart, "stats": self.compression.stats()}

    def hash(self) -> int:
        return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters()))


def host() -> str:
    return f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"


def note(state: Any, *, begins: bool = False) -> None:
    with (folder / f"steps.{os.getpid()}").open("a") as notes:
        line = {"step": state.batch, "world": hvd.size(), "rank": hvd.rank(), "at": time.time(), "begins": begins}
        notes.write(json.dumps(line | {"weights": [each.hash() for each in trained]}) + "\n")


def write_hosts(hosts: list[str]) -> None:
    (folder / "new").write_text("\n".join(hosts) + "\n")
    (folder / "new").rename(folder / "hosts")


def change_hosts(state: Any) -> None:
    """Let hosts change, or a rank die, where that is due at this step; wait for word of it."""
    end = time.monotonic() + PATIENCE
    for event in (event for event in case.get("events", []) if event["step"] == state.batch):
        if event.get("kill") == host() and not (folder / f"killed.{state.batch}").exists():
            (folder / f"killed.{state.batch}").write_text(str(time.time()))
            threading.Timer(event.get("after", 0.0), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        if "hosts" in event and hvd.rank() == 0 and not (folder / f"changed.{state.batch}").exists():
            (folder / f"changed.{state.batch}").write_text(str(time.time()))
            write_hosts(event["hosts"])
            if "then" in event:  # another change, perhaps before the first one is over
                threading.Timer(event["after"], lambda then=event["then"]: write_hosts(then)).start()
        while "world" in event and hvd.size() != event["world"] and time.monotonic() < end:
            time.sleep(PAUSE)
            commit(state)


def commit(state: Any) -> None:
    if state.batch % case.get("commit_every", 1) == 0:
        state.commit()
    else:
        state.check_host_updates()


@hvd.elastic.run
def train(state: Any) -> None:
    note(state, begins=True)
    kills.begins(state.batch)
    while state.batch < case["steps"] or kills.pending(state.batch):
        change_hosts(state)
        kills.step(state.batch)
        grads, mean = grads_of(state.batch, hvd.rank()), mean_of(state.batch, hvd.size())
        for each in trained:
            each.step(grads)
        state.offered = {name: state.offered.get(name, 0.0) + mean[name] for name in mean}
        state.summed = {name: state.summed.get(name, 0.0) + hvd.size() * mean[name] for name in mean}
        state.batch += 1
        note(state)
        time.sleep(case.get("pause", 0.0))
        commit(state)


def plant(inside: str, step: int) -> None:
    """Let this rank die inside of what its compressions do at a reset or commit, from a step on."""
    stock = getattr(Resets, inside)

    def die(*given: Any) -> Any:
        if state.batch >= step:
            (folder / f"killed.{state.batch}").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*given)

    setattr(Resets, inside, die)


class Kills:
    """Lets ranks die one after the other, each some time after a moment in a step or in a recovery.

    Args:
        due: of each its rank, when ("step", a few steps after ranks began to train; "restore", as it learns of the
            death before; "sync", once Horovod has started again), and after how many seconds more.
    """

    def __init__(self, due: Sequence[dict[str, Any]]) -> None:
        self._due, self._first_world = due, hvd.size()
        self._rank = self._begun = 0
        self._starting = folder / f"starting.{host()}"

    def begins(self, step: int) -> None:
        self._starting.unlink(missing_ok=True)
        self._rank, self._begun = hvd.rank(), step

    def pending(self, step: int) -> bool:
        """Return whether to go on with training: ranks are still to die, or the last one has only just died."""
        last_world = self._first_world - len(self._due)
        return bool(self._due) and (hvd.size() > last_world or step < self._begun + STEPS_BETWEEN)

    def step(self, step: int) -> None:
        if step >= self._begun + STEPS_BETWEEN:
            self._arm("step")

    def watch(self, state: Any) -> None:
        """Note when this rank is in Horovod's start, and let it die in a recovery."""
        restore, init, sync = state.restore, elastic.init, state.sync

        def arm_then_restore() -> None:
            self._arm("restore")
            restore()

        def note_then_init() -> None:
            self._starting.touch()
            init()

        def meet_then_sync() -> None:
            hvd.barrier()  # all have started
            self._starting.unlink(missing_ok=True)
            self._arm("sync")
            sync()

        vars(state).update(restore=arm_then_restore, sync=meet_then_sync)
        elastic.init = note_then_init

    def _arm(self, when: str) -> None:
        number = len(list(folder.glob("killed.*")))
        due = self._due[number] if number < len(self._due) else {}
        if when == "step" and hvd.size() + number != self._first_world:
            return  # the others have not recovered from the last death yet
        if (due.get("rank"), due.get("when")) == (self._rank, when):
            with contextlib.suppress(FileExistsError):
                (folder / f"armed.{number}").touch(exist_ok=False)
                threading.Timer(due["after"], self._die, [number]).start()

    def _die(self, number: int) -> None:
        """End this rank. It waits while all ranks are in Horovod's start: a death there ends the whole job."""
        end = time.monotonic() + PATIENCE
        while self._starting.exists() and len(list(folder.glob("starting.*"))) + number == self._first_world:
            assert time.monotonic() < end, "ranks do not get past Horovod's start"
            time.sleep(0.001)
        self._starting.unlink(missing_ok=True)
        (folder / f"killed.{number}").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


hvd.init()
logging.basicConfig(level=case.get("log", "WARNING"))
shapes = dict(fresh().named_parameters())
hvc.elastic(neighbour_copy=case.get("copies", False))
trained = [Trained(asked) for asked in case["trained"]]
parts: dict[str, Any] = {}
for number, each in enumerate(trained):
    parts |= {f"model{number}": each.model, f"optimizer{number}": each.optimizer}
    parts |= {f"hvc{number}": each.compression} if each.compression is not hvd.Compression.none else {}
state = hvd.elastic.TorchState(batch=0, offered={}, summed={}, **parts)
if (fault := case.get("fault")) and fault["host"] == host():
    plant(fault["inside"], fault["step"])
kills = Kills(case.get("kills", []))
if "kills" in case:
    kills.watch(state)
train(state)
ends = [each.end(state) for each in trained]
end = {"rank": hvd.rank(), "world": hvd.size(), "step": state.batch, "trained": ends}
(folder / f"unfinished.{hvd.rank()}").write_text(json.dumps(end))
(folder / f"unfinished.{hvd.rank()}").rename(folder / f"end.{hvd.rank()}")
