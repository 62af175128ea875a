"""Adaptive schedules in real jobs: both paths, odd models, and going on from a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from horovod_compress.engine import tuning
from horovod_compress.schedule.plan import Plan
from tests.support.rank import check
from tests.support.states import resealed
from tests.support.training import digest, gathered, loss_of, net, optimizer_for, train

hvd.init()
torch.set_num_threads(1)
STEPS = 64
tuning.LEAST_ELEMENTS = 1  # these models are small


class Odd(nn.Module):
    """A shared parameter, an unused one, and layers whose gradients come in another order on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared, self.unused = nn.Linear(64, 64), nn.Linear(3, 5)
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x.flatten(1)).tanh())
        first, second = (self.left, self.right) if hvd.rank() % 2 else (self.right, self.left)
        return second(first(x).tanh()) + first(second(x).tanh())


def tuned(make: Any, schedule: str, method: Any, attach: bool) -> dict[str, Any]:
    model = make()
    optimizer, compression = optimizer_for(model, method, attach, schedule=schedule)
    assert compression is not None
    digests = []
    for step in range(STEPS):
        train(model, optimizer, [step], loss_of)
        digests.append((digest(model.parameters()), compression.plan.fingerprint()))
    by_rank = gathered(digests)
    found = {
        "steps": [list(step) for step in zip(*by_rank, strict=True)],
        "chosen": compression._session.steps.tuner.chosen,  # type: ignore[union-attr]
        "verified": compression.stats()["verified"],
        "plans": len({plan for _, plan in digests}),
    }
    compression.close()
    return found


for name, make in (("net", net), ("odd", Odd)):
    for schedule in ("auto", "layerfusion", "mergecomp"):
        for attach in (False, True):
            check(f"{name} {schedule} {attach}", lambda: tuned(make, schedule, "topk", attach))

check("layers auto True", lambda: tuned(net, "auto", {"3.*": "topk", "*": "marsit"}, True))

in_sketch = hvc.method("sketch_fusion", error_feedback="sketch", cells=0.5)
check("tables auto True", lambda: tuned(net, "auto", {"3.*": "powersgd", "*": in_sketch}, True))


def resumed(method: Any, prefix: str) -> Any:
    """Save after the choice, and go on in a new compression: at once with the chosen buckets."""
    model = net()
    optimizer, compression = optimizer_for(model, method, True, schedule="layerfusion", prefix=f"before.{prefix}")
    train(model, optimizer, range(12))
    assert compression is not None
    state, plan = compression.state_dict(), compression.plan
    whole = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(12, 16))
    compression.close()
    other = net()
    again, continued = optimizer_for(other, method, True, schedule="layerfusion", prefix=f"again.{prefix}")
    assert continued is not None
    renamed = renamed_state(state)
    other.load_state_dict(whole[0])
    again.load_state_dict(whole[1])
    continued.load_state_dict(renamed)
    same_plan = [len(b.tensors) for b in continued.plan.buckets] == [len(b.tensors) for b in plan.buckets]
    train(other, again, range(12, 16))
    continued.close()
    return [state["tuned"], same_plan, digest(model.parameters()) == digest(other.parameters())]


def renamed_state(state: dict[str, Any]) -> dict[str, Any]:
    """Horovod wants other names for the parameters of a second optimizer."""

    def again(name: str) -> str:
        return name.replace("before.", "again.")

    kept = {kind: {again(n): t for n, t in tensors.items()} for kind, tensors in state["state"].items()}
    buckets = [
        entry | {"tensors": [[again(name), *rest] for name, *rest in entry["tensors"]]} for entry in state["buckets"]
    ]
    plan = Plan.from_document(buckets).fingerprint()
    return resealed(state | {"state": kept, "buckets": buckets, "plan": plan})


check("resumed", lambda: resumed("ef_signsgd", ""))
check("resumed with tables", lambda: resumed(in_sketch, "sketch."))


def beside_a_process_set() -> Any:
    """Ranks outside a process set make fewer compressions that look for buckets; the next one is of all."""
    chosen = hvd.add_process_set([0])
    model = net()
    optimizer, compression = optimizer_for(model, "topk", True, schedule="auto", prefix="alone.", process_set=chosen)
    train(model, optimizer, range(2))
    if compression:
        compression.close()
    model = net()
    optimizer, compression = optimizer_for(model, "topk", True, schedule="auto", prefix="all.")
    train(model, optimizer, range(6))
    assert compression is not None
    compression.close()
    hvd.remove_process_set(chosen)
    return len(set(gathered(digest(model.parameters()))))


check("beside a process set", beside_a_process_set)


def refused() -> str:
    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.topk(named, schedule="mergecomp")
    try:
        hvc.DistributedUpdateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, compression)
    except hvc.ConfigError as error:
        return str(error)
    finally:
        compression.close()
    return "accepted"


check("update mode", refused)
