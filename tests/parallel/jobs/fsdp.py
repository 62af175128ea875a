"""Models that ``fully_shard`` divides, in replicas: beside torch's own hybrid sharding, and by laws of residuals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.fsdp as hvc
from horovod_compress.fsdp import HorovodCompressError
from tests.support.logs import told
from tests.support.nets import digest
from tests.support.rank import arguments, check, folder, rank

dist.init_process_group("gloo")
ASKED = arguments()
LONG = 30.0
WIDE, ROWS, THIN = 12, 7, 2
BF16 = torch.bfloat16


MESHES: dict[tuple[int, int], DeviceMesh] = {}


def grid(replicas: int, shards: int) -> DeviceMesh:
    """Return a mesh of all ranks; they make each one once."""
    if (replicas, shards) not in MESHES:
        MESHES[replicas, shards] = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return MESHES[replicas, shards]


REPLICAS, SHARDS = ASKED["grid"]
MESH = grid(REPLICAS, SHARDS)


class Net(nn.Module):
    """Blocks with rows that shards do not divide evenly, or that not every shard has one of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + rank() // SHARDS)  # each replica another one: they begin with that of replica 0
        self.first = nn.Sequential(nn.Linear(WIDE, 30), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(30, ROWS), nn.Tanh())
        self.last = nn.Linear(ROWS, THIN)
        self.unused = nn.Linear(3, 3)

    def forward(self, given: Tensor) -> Tensor:
        return self.last(self.second(self.first(given)))  # type: ignore[no-any-return]


def batch(step: int, part: int = 0, of: int | None = None) -> Tensor:
    seed = 1000 * step + 100 * part + (rank() if of is None else of)
    return torch.randn(16, WIDE, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, step: int, part: int = 0, of: int | None = None) -> Tensor:
    given = batch(step, part, of)
    return (model(given).float() - given[:, :THIN].sin()).square().mean()


def divided(model: Any, mesh: DeviceMesh, case: dict[str, Any]) -> Any:
    """Return a model whose blocks, and itself, were given to fully_shard()."""
    options: dict[str, Any] = {"mesh": mesh}
    if precision := case.get("precision"):
        options["mp_policy"] = MixedPrecisionPolicy(*precision)
    if case.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "reshards" in case:
        options["reshard_after_forward"] = case["reshards"]
    if not case.get("unused"):
        del model.unused
    if case.get("frozen"):
        model.first.requires_grad_(False)
    if case.get("checkpoints"):
        model.first, model.second = checkpoint_wrapper(model.first), checkpoint_wrapper(model.second)
    if case.get("compiled"):
        model.first.compile()
        model.second.compile()
    for block in model.children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in (*model.children(), model) if "factor" in case else ():
        module.set_force_sum_reduction_for_comms(SHARDS > 1)  # Gloo has no other, and one shard is divided twice by it
        module.set_gradient_divide_factor(case["factor"])
    return model


def made(method: str | None, case: dict[str, Any], mesh: DeviceMesh = MESH) -> tuple[Any, Any, Any]:
    """Return model, optimizer and compression; without a method, torch's own hybrid sharding and None."""
    if method is None:
        torch.manual_seed(1)
    model = Net()
    if method is None:
        theirs = [parameter.detach() for parameter in model.parameters()]
        for tensor in theirs:
            dist.broadcast(tensor, 0)
    divided(model, mesh if method is None else mesh["shard"], case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = (
        torch.optim.SGD(trained, lr=case["lr"])
        if "lr" in case
        else torch.optim.AdamW(trained, lr=case.get("adam", 0.01))
    )
    if method is None:
        return model, optimizer, None
    options = {"verify_every": 1, "timeout": LONG} | case.get("options", {})
    compression = hvc.Compression.create(method, model.named_parameters(), **options)
    compression.register(model, optimizer, replicate=mesh["replicate"], **case.get("register", {}))
    return model, optimizer, compression


def whole(model: nn.Module) -> list[Tensor]:
    """Return the whole of each parameter, which all ranks put together."""
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def norm_of(found: Any) -> float:
    return float(found.full_tensor() if hasattr(found, "full_tensor") else found)


def train(method: str | None, case: dict[str, Any]) -> tuple[list[Tensor], list[float], Any]:
    """Train; return the weights, the norms that clipping has seen, and what refused steps said."""
    model, optimizer, compression = made(method, case)
    passes, norms, told = case.get("passes", 1), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if case.get("scaler") else None
    if scaler and compression:
        compression.follow(scaler)
    for step in range(case.get("steps", 6)):
        optimizer.zero_grad()
        for part in range(passes):
            if compression is None or case.get("sync"):
                model.set_requires_gradient_sync(part + 1 == passes)
            last = compression is None or case.get("sync") or part + 1 == passes
            with contextlib.nullcontext() if last else compression.no_sync():
                loss = loss_of(model, step, part) * (float("inf") if case.get("bad") == [step, rank()] else 1.0)
                try:
                    (scaler.scale(loss) if scaler else loss).backward()
                except hvc.NonFiniteError as error:
                    told.append(str(error))
                    optimizer.zero_grad()
        if scaler:
            scaler.unscale_(optimizer)
        norms.append(norm_of(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        (scaler.step if scaler else lambda one: one.step())(optimizer)
        if scaler:
            scaler.update()
        if compression:
            assert len({digest(weights) for weights in of_all(whole(model))}) == 1, step
    found = whole(model)
    if compression:
        compared = case.get("steps", 6) - len(told) if compression._here().reducer.world > 1 else 0
        assert compression.stats()["verified"] >= compared
        compression.close()
    return found, norms, told or (scaler and scaler.get_scale())


#: What torch's own hybrid sharding does, and ours with `none` has to.
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "for some time": {"steps": 20},
    "kept whole after the forward pass": {"reshards": False},
    "bfloat16 weights": {"precision": (BF16, torch.float32)},
    "accumulation by no_sync": {"passes": 3},
    "accumulation of whole gradients": {"passes": 3, "sync": True},
    "frozen": {"frozen": True},
    "checkpoints": {"checkpoints": True},
    "offload": {"offload": True},
    "a factor": {"factor": 7.0, "lr": 0.1},
    "a scaler, and an infinity in one shard": {"scaler": True, "bad": [3, 3]},
    "accumulation, a scaler, and an infinity in one shard": {"passes": 3, "scaler": True, "bad": [3, 3]},
    "compiled": {"compiled": True},
    "bfloat16 reduction": {"precision": (BF16, BF16)},
}


def beside(case: dict[str, Any]) -> dict[str, Any]:
    (stock, theirs, scale), (ours, norms, other) = train(None, case), train("none", case)
    far = max(float((a - b).abs().max()) for a, b in zip(stock, ours, strict=True))
    far_norms = [abs(a / b - 1) for a, b in zip(theirs, norms, strict=True) if b < float("inf")]
    moved = train("topk", case)[0]
    control = max(float((a - b).abs().max()) for a, b in zip(moved, ours, strict=True))
    return {"far": far, "norms": max(far_norms), "scales": [scale, other], "control": control}


def exact_means(model: Any, compression: Any, step: int) -> list[Tensor]:
    """Return this rank's shard of the mean gradient, which nobody else sees."""
    with compression.no_sync():
        loss_of(model, step).backward()
    found = []
    for parameter in model.parameters():
        grad = parameter.grad.to_local().clone()
        dist.all_reduce(grad, group=MESH["replicate"].get_group())
        found.append(grad / REPLICAS)
        parameter.grad = None
    return found


def conserved(method: str, options: dict[str, Any]) -> float:
    """Return how far results and what waits are from the sum of gradients, per shard, relative to that."""
    case = {"lr": 0.05, "options": options | {"follow_lr": False}, "register": {"match_norm": False}}
    model, optimizer, compression = made(method, case)
    names = [name for name, _ in model.named_parameters()]
    sums = [torch.zeros_like(p.to_local(), dtype=torch.float64) for p in model.parameters()]
    results = [torch.zeros_like(one) for one in sums]
    for step in range(12):
        torch._foreach_add_(sums, [grad.double() for grad in exact_means(model, compression, step)])
        loss_of(model, step).backward()
        torch._foreach_add_(results, [parameter.grad.to_local().double() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    far = size = 0.0
    waiting = residuals(compression)
    for name, total, given in zip(names, sums, results, strict=True):
        mean = waiting[name].to_local()[0].double() if name in waiting else torch.zeros_like(total)
        dist.all_reduce(mean, group=MESH["replicate"].get_group())
        far += float((total - given - mean / REPLICAS).square().sum())
        size += float(total.square().sum())
    compression.close()
    return (far / max(size, 1e-30)) ** 0.5


def norms(match_norm: bool) -> float:
    """Return the mean ratio of what clipping sees and the norm of the exact mean, in coded steps."""
    model, optimizer, compression = made(
        "marsit", {"adam": 1e-4, "register": {"warmup_steps": 4, "match_norm": match_norm}}
    )
    ratios = []
    for step in range(24):
        exact = sum(float(grad.square().sum()) for grad in exact_means(model, compression, step))
        total = torch.tensor(exact)
        dist.all_reduce(total, group=MESH["shard"].get_group())
        loss_of(model, step).backward()
        found = norm_of(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        assert len(set(of_all(found))) == 1
        if step >= 6:
            ratios.append(found / float(total.sqrt()))
        optimizer.step()
        optimizer.zero_grad()
    compression.close()
    return sum(ratios) / len(ratios)


def refused() -> dict[str, str]:
    """Return what is said of models and meshes that do not fit."""

    def told(case: Callable[[], object]) -> str:
        try:
            case()
        except HorovodCompressError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    def create(model: nn.Module, **options: Any) -> Any:
        return hvc.Compression.none(model.named_parameters(), timeout=LONG, **options)

    def model_of(mesh: DeviceMesh = MESH["shard"]) -> Any:
        return divided(Net(), mesh, {})

    def stepping() -> Any:
        model = model_of()
        made = create(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: None)
        made.register(model, replicate=MESH["replicate"])

    def columns() -> Any:
        one = model_of()
        method = "topk" if rank() % SHARDS else "none"
        hvc.Compression.create(method, one.named_parameters(), timeout=LONG).register(one, replicate=MESH["replicate"])

    def twice() -> Any:
        model = model_of()
        made = create(model, replicate=MESH["replicate"])
        made.register(model)
        try:
            made.register(model)
        finally:
            made.close()

    cases: dict[str, Callable[[], object]] = {
        "two dimensions": lambda: create(model_of(MESH)),
        "whole": lambda: create(Net()),
        "no mesh": lambda: create(one := model_of()).register(one),
        "the other dimension": lambda: create(one := model_of()).register(one, replicate=MESH["shard"]),
        "both dimensions": lambda: create(one := model_of()).register(one, replicate=MESH),
        "a hook": stepping,
        "wrapped": lambda: create(model_of()).register(DistributedDataParallel(Net()), replicate=MESH["replicate"]),
        "twice": twice,
        "not registered": lambda: create(model_of()).stats(),
        "a scaler before": lambda: create(model_of()).follow(torch.amp.GradScaler("cpu")),
        "an option": lambda: hvc.Compression.topk(model_of().named_parameters(), density=7),
        "other options of another shard": columns,
        "hosts": lambda: create(model_of(), exchange="hierarchical"),
        "masks": lambda: hvc.Compression.create(hvc.masked("topk"), model_of().named_parameters()),
        "local steps": lambda: hvc.DistributedUpdateOptimizer(
            torch.optim.SGD((one := model_of()).parameters(), lr=0.1), one.named_parameters(), create(one)
        ),
        "no optimizer": lambda: create(one := model_of()).register(one, [], replicate=MESH["replicate"]),
    }
    return {name: told(case) for name, case in cases.items()}


def of_a_rank(method: str, steps: range, where: str, *, mesh: DeviceMesh = MESH, load: str = "", save: str = "") -> Any:
    """Train for some steps; return a digest of the weights, and the mean over replicas of what waits at the start."""
    model, optimizer, compression = made(method, {"register": {"warmup_steps": 3, "rebuild_every": 4}}, mesh)
    place = folder() / where
    if load:
        states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        replicas = int(load) if load.isdigit() else 0
        together = {} if load == "folder" else {"compression": compression}
        together = {"compression": compression.resharded(replicas=replicas)} if replicas else together
        dcp.load(states | together, checkpoint_id=place / "dcp")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        if load == "folder":
            compression.load(place / "own")
    waits = waiting(compression)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    if save:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states | {"compression": compression}, checkpoint_id=place / "dcp")
        compression.save(place / "own")
        waits = waiting(compression)
    found = digest(whole(model))
    compression.close()
    return found, waits


def residuals(compression: Any) -> dict[str, Any]:
    """Return what waits on all ranks, by name."""
    (kept,) = (part for name, part in compression.state_dict().items() if name.startswith("residuals of"))
    return kept.get("residual", {})  # type: ignore[no-any-return]


def waiting(compression: Any) -> list[float]:
    """Return the sum of each tensor of what waits, as a mean over replicas."""
    kept = residuals(compression)
    return [float(tensor.full_tensor().double().sum()) / tensor.shape[0] for tensor in kept.values()]


def resumed(method: str) -> dict[str, Any]:
    """Return the weights after 12 steps in one go, and in two; and what waits when it was divided anew.

    The first four, the eighth and the last step are exact.
    """
    straight, _ = of_a_rank(method, range(12), method)
    _, saved = of_a_rank(method, range(6), method, save="both")
    found = {how: of_a_rank(method, range(6, 12), method, load=how)[0] for how in ("dcp", "folder")}
    shapes = ((1, 4), (4, 1)) if ASKED.get("all grids") else ((1, 4),)
    grids = {str(shape): grid(*shape) for shape in shapes} if dist.get_world_size() == 4 else {}
    sums = {
        name: of_a_rank(method, range(6, 8), method, mesh=mesh, load=str(REPLICAS))[1] for name, mesh in grids.items()
    }
    return {"straight": straight, "resumed": found, "saved": saved, "sums": sums}


def other_grid(method: str) -> str:
    """Return what is said where the folder of another grid is loaded."""
    _, _, compression = made(method, {}, grid(1, 4))
    try:
        compression.load(folder() / method / "own")
    except HorovodCompressError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        compression.close()
    return "nothing was raised"


def before_registering() -> dict[str, Any]:
    """Return what happens where a program does other things first: evaluates, loads a state, forgets to register."""
    model = divided(Net(), MESH["shard"], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compression = hvc.Compression.topk(model.named_parameters(), min_elements=40, verify_every=1, timeout=LONG)
    shown = repr(compression)
    with torch.no_grad():
        loss_of(model, 0)  # the root's parameters stay whole now
    get_state_dict(model, optimizer)  # makes a step without gradients
    wrong = ""
    try:
        compression.register(model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), replicate=MESH["replicate"])
    except hvc.ConfigError as error:
        wrong = str(error)
    compression.register(model, optimizer, replicate=MESH["replicate"])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    dcp.save({"compression": compression}, checkpoint_id=folder() / "before")  # some shards go uncompressed
    equal = len({digest(weights) for weights in of_all(whole(model))}) == 1
    with told() as texts:
        model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # of parameters that nobody exchanges
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    compression.close()
    said = [text for text in texts if "first.0.weight" in text and "no compression of this program exchanges" in text]
    return {"shown": shown, "wrong": wrong, "equal": equal, "assigned": len(said), "other": other_checkpoint()}


def other_checkpoint() -> str:
    """Return what torch says where a checkpoint of another grid is loaded as that of this one."""
    _, _, compression = made("topk", {"options": {"min_elements": 40}}, grid(4, 1))
    try:
        dcp.load({"compression": compression}, checkpoint_id=folder() / "before")
    except dcp.api.CheckpointException as error:  # which is no Exception
        return str(error)
    finally:
        compression.close()
    return "nothing was raised"


def sums_kept(compression: Any, *kinds: str) -> dict[str, float]:
    """Return the sum of what waits for each tensor, whatever it is kept as, as a mean over replicas.

    Args:
        kinds: only what is kept as one of these.
    """
    found: dict[str, float] = {}
    for key, kept in compression.state_dict().items():
        for kind, tensors in kept.items() if key.startswith("residuals of") else ():
            for name, tensor in tensors.items() if not kinds or kind in kinds else ():
                total = float(tensor.full_tensor().double().sum()) / tensor.shape[0]
                found[name] = found.get(name, 0.0) + total
    return found


def small_shards() -> dict[str, Any]:
    """Return what waits where shards of a tensor, of 7 rows of 30, are small in some columns or grids only."""
    found, place = {}, folder() / "small"
    for grid_of in ((REPLICAS, SHARDS), (REPLICAS, SHARDS), (1, 4)):
        case = {"lr": 0.05, "options": {"min_elements": 100, "density": 0.05}}
        model, optimizer, compression = made("topk", case, grid(*grid_of))
        if found:
            here = compression.resharded(replicas=REPLICAS)
            dcp.load({"compression": here}, checkpoint_id=place)
        for step in range(0 if found else 3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not found:
            dcp.save({"compression": compression}, checkpoint_id=place)
        found["saved" if not found else str(grid_of)] = sums_kept(compression)
        compression.close()
    return found


def of_dead_columns(mesh: DeviceMesh, steps: range, place: Any = None, *, save: bool = False) -> dict[str, Any]:
    """Train one layer that never has a gradient for column 0, and for column 2 in step 5 only; step 11 is exact."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(WIDE, 8, bias=False))
    for one in (model[0], model):
        fully_shard(one, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=LONG)
    compression.register(model, optimizer, replicate=mesh["replicate"], warmup_steps=3, rebuild_every=8)
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if not save:
        dcp.load(states | {"compression": compression.resharded(replicas=REPLICAS)}, checkpoint_id=place)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    waits = [sums_kept(compression, "waiting")]
    columns = []
    for step in steps:
        given = batch(step)
        given[:, 0] = 0
        given[:, 2] *= step == 5
        optimizer.zero_grad()
        (model(given) - given[:, 1:2].sin()).square().mean().backward()
        optimizer.step()
        columns.append([digest([whole(model)[0][:, column].contiguous()]) for column in (0, 2, 3)])
    if save:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states | {"compression": compression}, checkpoint_id=place)
        waits = [sums_kept(compression, "waiting")]
    compression.close()
    return {"waits": waits[0], "columns": columns}


def dead_columns() -> dict[str, Any]:
    """Return what waits for elements without a second moment, and what becomes of them on other grids."""
    place = folder() / "dead"
    found = {"saved": of_dead_columns(MESH, range(6), place, save=True)}
    return found | {
        str(shape): of_dead_columns(grid(*shape), range(6, 13), place) for shape in ((REPLICAS, SHARDS), (1, 4), (4, 1))
    }


OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def local_steps(method: str, mesh: DeviceMesh, bad: int = -1) -> tuple[list[Tensor], list[str]]:
    """Take local steps in update mode; ranks of other grids than the usual one have the data of all of a replica."""
    model = divided(Net(), mesh["shard"], {})
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    compression = hvc.Compression.create(method, model.named_parameters(), verify_every=1, timeout=LONG)
    optimizer: Any = hvc.DistributedUpdateOptimizer(
        plain, model.named_parameters(), compression, communication_delay=3, outer_optimizer=OUTER, warmup_exchanges=2,
        clip="median", overlap=1, replicate=mesh["replicate"],
    )  # fmt: skip
    told = []
    row = range(SHARDS * (rank() // SHARDS), SHARDS * (rank() // SHARDS + 1))
    for step in range(12):
        optimizer.zero_grad()
        ranks = [rank()] if mesh is MESH else row
        loss = sum(loss_of(model, step, of=one) for one in ranks) / len(ranks)
        (loss * float("nan") if (step, rank()) == (7, bad) else loss).backward()
        try:
            optimizer.step()
        except hvc.NonFiniteError as error:
            told.append(str(error))
    if bad < 0:
        optimizer.flush()
    found = whole(model)
    compression.close()
    return found, told


def updates() -> dict[str, Any]:
    """Return how far a divided model ends from one that is whole on every rank, and what a NaN of one rank brings."""
    (divided_one, _), (whole_one, _) = local_steps("none", MESH), local_steps("none", grid(4, 1))
    far = max(float((a - b).abs().max()) for a, b in zip(divided_one, whole_one, strict=True))
    moved = digest(local_steps("marsit", MESH)[0])
    _, told = local_steps("none", MESH, bad=3)
    return {"far": far, "equal": len(set(of_all(moved))) == 1, "told": told}


def equal(method: str) -> str:
    """Return a digest of the weights, which all replicas had after each of some steps."""
    return digest(train(method, {"steps": 8, "register": {"warmup_steps": 2, "rebuild_every": 3}})[0])


for name in ASKED.get("ways", ()):
    check(name, lambda: beside(WAYS[name]))
for name in ASKED.get("methods", ()):
    check(name, lambda: equal(name))
for method, options in ASKED.get("conserve", ()):
    check(f"{method} conserves", lambda: conserved(method, options))
for name in ASKED.get("resume", ()):
    check(f"{name} resumes", lambda: resumed(name))
    check(f"{name} on another grid", lambda: other_grid(name))
for name in ASKED.get("more", ()):
    check(
        name,
        {
            "norms": lambda: [norms(True), norms(False)],
            "refused": refused,
            "updates": updates,
            "before": before_registering,
            "small shards": small_shards,
            "dead columns": dead_columns,
            "raise": lambda: train(
                "topk", {"bad": [2, rank()] if rank() == 3 else [], "options": {"nonfinite": "raise"}}
            )[2],
        }[name],
    )
dist.destroy_process_group()
