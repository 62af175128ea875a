"""Train, save; in a job of other ranks load, and go on. Gradients are known: no data makes them.

Weights are moved by plain SGD at a rate of 1, so what they have lost is the sum of all results.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_compress.engine.shards import local
from tests.support import front
from tests.support.nets import digest
from tests.support.rank import arguments, check, rank

ASKED = arguments()
FOLDER = Path(ASKED["folder"])
WORLD: int = ASKED["world"]
#: Steps before and after. Local steps are exchanged two at a time.
BEFORE, AFTER, DELAY = 7, 3, 2
SHARDED = "fsdp"

Tensors = dict[str, Tensor]


class Known(nn.Module):
    """A model with whatever gradients it is given; rows do not divide evenly among shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(33, 21), nn.Linear(21, 5)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(p * grads[name]).sum() for name, p in self.named_parameters()]).sum()


SHAPES = {name: parameter.shape for name, parameter in Known().named_parameters()}


def grads_of(step: int, number: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def total_of(step: int, summed: bool) -> Tensors:
    """Return the mean over ranks of what they offer in a step, or the sum."""
    each = [grads_of(step, number) for number in range(WORLD)]
    times = 1 if summed else WORLD
    return {name: torch.stack([grads[name].double() for grads in each]).sum(dim=0) / times for name in SHAPES}


class Trained:
    """A model with its compression.

    Args:
        case: path ("stock" or "attached", "ddp" or "plain", "update" or "fsdp"), method, options, adam (AdamW in place
            of SGD, with a second moment that is held), sum (of results instead of the mean), grid (of "fsdp").
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.path, self.model = case, case["path"], Known()
        self.summed, self.mesh = case.get("sum", False), None
        hvc: Any = front.hvc
        if self.path == SHARDED:
            import horovod_compress.fsdp as hvc

            self.mesh = self._divided(case["grid"])
        self.hvc, named = hvc, list(self.model.named_parameters())
        options = {"timeout": 30.0, "verify_every": 1} | case.get("options", {})
        self.compression = hvc.Compression.create(case["method"], named, **options)
        plain: Any = torch.optim.SGD(self.model.parameters(), lr=1.0)
        if case.get("adam"):
            plain = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.called, self.optimizer = self._joined(plain, {"warmup_steps": 3} if case.get("adam") else {})

    def _divided(self, shape: tuple[int, int]) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.model, mesh=mesh["shard"])
        return mesh

    def _joined(self, plain: Any, moment: dict[str, Any]) -> tuple[Any, Any]:
        """Return what is called and what makes the steps."""
        compression, named = self.compression, list(self.model.named_parameters())
        if self.path == "update":
            local_steps = moment | {"communication_delay": DELAY}
            return self.model, self.hvc.DistributedUpdateOptimizer(plain, named, compression, **local_steps)
        if self.mesh is not None:
            compression.register(self.model, plain, replicate=self.mesh["replicate"], **moment)
            return self.model, plain
        if front.DDP:
            return front.trained(self.model, plain, compression, moment, plain=self.path == "plain")
        import horovod.torch as hvd

        op = hvd.Sum if self.summed else hvd.Average
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression, op=op)
        return self.model, compression.attach(optimizer, **moment) if self.path == "attached" else optimizer

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.called(grads_of(number, rank())).backward()
        self.optimizer.step()

    def waits(self) -> Tensors:
        """Return what a result has not had yet: the mean over ranks of their residuals, or the sum."""
        kept = self.compression._here().reducer.kept
        mine = {name: tensor.double() for name, tensor in kept.residuals().items()}
        ranks = kept.ranks if self.path != SHARDED else self.mesh["replicate"].size()
        times = 1 if self.summed else ranks
        found = {name: self._sum(tensor) / times for name, tensor in mine.items()}
        for name, of_mean in kept.states().get("server", {}).items():  # each element's owner has it
            found[name] += self._sum(of_mean.double()) * (ranks if self.summed else 1)
        return {name: self._whole(name, tensor) for name, tensor in found.items()}

    def _sum(self, tensor: Tensor) -> Tensor:
        if front.DDP:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.mesh["replicate"].get_group() if self.mesh is not None else None)
            return tensor
        import horovod.torch as hvd

        return hvd.allreduce(tensor, op=hvd.Sum)  # type: ignore[no-any-return]

    def _whole(self, name: str, mine: Tensor) -> Tensor:
        """Return the whole of what each shard has a part of."""
        if self.mesh is None:
            return mine.view(SHAPES[name])
        from torch.distributed.tensor import DTensor

        parameter: Any = self.model.get_parameter(name)
        mine = mine.view(parameter.to_local().shape)
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(
            mine, self.mesh["shard"], parameter.placements, run_check=False, shape=shape, stride=stride
        ).full_tensor()

    def weights(self) -> Tensors:
        found = self.model.named_parameters()
        return {name: (p.full_tensor() if self.mesh is not None else p).detach().clone() for name, p in found}

    def apart(self, offered: Tensors) -> float:
        """Return how far all that was offered is from what has moved the weights, and what waits."""
        waits, after, sign = self.waits(), self.weights(), -1.0 if self.path == "update" else 1.0
        return max(
            float((before.detach() - after[name] + sign * waits.get(name, 0.0) - offered[name]).abs().max())
            for name, before in Known().named_parameters()
        )


def more(offered: Tensors, step: int, summed: bool) -> Tensors:
    return {name: offered[name] + total for name, total in total_of(step, summed).items()}


def norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).norm())


def saved(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """Train for some steps, and save."""
    trained, offered = Trained(case), {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(BEFORE):
        trained.step(step)
        offered = more(offered, step, trained.summed)
    if trained.path == "update":
        trained.optimizer.flush()
    waits, weights, apart = trained.waits(), trained.weights(), trained.apart(offered)
    if rank() == 0:
        place.mkdir(exist_ok=True)
        kept = {"waits": waits, "weights": weights, "offered": offered}
        if case.get("adam") and trained.mesh is None:
            kept["optimizer"] = trained.optimizer.state_dict()
        torch.save(kept, place / "model.pt")
    trained.compression.save(place / "compression")
    if trained.path == SHARDED:
        import torch.distributed.checkpoint as dcp

        dcp.save({"compression": trained.compression}, checkpoint_id=place / "dcp")
    trained.compression.close()
    return {"norm": norm(waits), "apart": apart}


def loaded(case: dict[str, Any], place: Path) -> dict[str, Any]:
    """Load on other ranks; return how far what waits is from what waited, and all from what was offered in the end."""
    trained, kept = Trained(case), torch.load(place / "model.pt", weights_only=True)
    with torch.no_grad():
        for name, parameter in trained.model.named_parameters():
            local(parameter).copy_(_part(trained, parameter, kept["weights"][name]))
    if "optimizer" in kept:
        trained.optimizer.load_state_dict(kept["optimizer"])
    if "replicas" in case:
        import torch.distributed.checkpoint as dcp

        dcp.load({"compression": trained.compression.resharded(replicas=case["replicas"])}, checkpoint_id=place / "dcp")
    else:
        trained.compression.load(place / "compression", residuals=case.get("residuals", "redistribute"))
    waits, offered = trained.waits(), kept["offered"]
    far = norm({name: waits[name] - waited for name, waited in kept["waits"].items()}) / norm(kept["waits"])
    for step in range(BEFORE, BEFORE + AFTER):
        trained.step(step)
        offered = more(offered, step, trained.summed)
    if trained.path == "update":
        trained.optimizer.flush()
    found = {"far": far, "apart": trained.apart(offered), "weights": digest(trained.weights().values())}
    trained.compression.close()
    return found


def _part(trained: Trained, parameter: Any, whole: Tensor) -> Tensor:
    """Return what this rank has of a weight."""
    if trained.mesh is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, trained.mesh["shard"], parameter.placements).to_local()


front.start()
torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO, format="%(message)s")
for name, asked in ASKED["cases"].items():
    check(name, lambda: (loaded if ASKED["load"] else saved)(asked, FOLDER / asked.get("from", name)))
