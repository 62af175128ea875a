"""Optimizers of all kinds on a front: whose second moment is held, what is told of others, and late parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.support.front import DDP, hvc, start, trained
from tests.support.logs import told
from tests.support.nets import batch, digest
from tests.support.rank import check, rank

start()
torch.set_num_threads(1)
LR = 0.01


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))


def train(called: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        called(batch(step, rank())).square().mean().backward()
        optimizer.step()


def plain(name: str, model: nn.Module) -> Any:
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(model.parameters(), lr=LR, **options)


def kept(name: str, method: str = "marsit", **attach: Any) -> dict[str, Any]:
    """Train; return what is held, and what was told."""
    model = net()
    compression = hvc.Compression.create(method, model.named_parameters(), verify_every=1, timeout=20.0)
    called, optimizer = trained(model, plain(name, model), compression, {"warmup_steps": 4} | attach)
    with told() as texts:
        train(called, optimizer, range(9))
    found = {"held": len(compression.state_dict().get("second_moment", {})), "told": texts}
    compression.close()
    return found | {"weights": digest(model.parameters())}


NAMES = ("AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor", "SGD")
check("kept", lambda: {name: kept(name) for name in NAMES})


def several(way: str) -> str:
    """Train with one optimizer of two groups, with two optimizers, or with one group: the control."""
    model = net()
    body, rest = list(model[1].parameters()), list(model[3].parameters())
    options: Any = [{"lr": LR}, {"lr": LR / 4}]
    if way in ("apart", "backwards", "repeated"):
        made = [torch.optim.AdamW(mine, **own) for mine, own in zip((body, rest), options, strict=True)]
    else:
        groups = [{"params": mine, **own} for mine, own in zip((body, rest), options, strict=True)]
        made = [torch.optim.AdamW(groups if way == "groups" else [*body, *rest], lr=LR)]
    compression = hvc.Compression.marsit(model.named_parameters(), verify_every=1, timeout=20.0, schedule="layerwise")
    if DDP:
        called = compression.register(model, made, warmup_steps=2)
    else:
        import horovod.torch as hvd

        named = [[(n, p) for n, p in model.named_parameters() if any(p is q for q in mine)] for mine in (body, rest)]
        each = named if len(made) > 1 else [[*named[0], *named[1]]]
        made = [
            hvd.DistributedOptimizer(one, named_parameters=own, compression=compression)
            for one, own in zip(made, each, strict=True)
        ]
        called, given = model, compression.attach(*made, warmup_steps=2)
        assert given is made[0] or list(given) == made
    for step in range(6):
        for optimizer in made:
            optimizer.zero_grad()
        hidden = called[2](called[1](called[0](batch(step, rank()))))
        # Either layer is left out on one rank, whose optimizer then hands over zeros.
        hidden = hidden.detach() if step == 4 and rank() else hidden
        (hidden if step == 3 and rank() else called[3](hidden)).square().mean().backward()
        for optimizer in reversed(made) if way == "backwards" else made:
            if way == "repeated":  # and no skip_synchronize(): results are left as they are
                optimizer.synchronize()
            optimizer.step()
    assert compression.stats()["steps"] == 6
    compression.close()
    return digest(model.parameters())


def other_passes() -> str:
    """Attach two optimizers of which one adds up two passes."""
    import horovod.torch as hvd

    model = net()
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    made = []
    for number in (1, 3):
        named = [(f"{number}.{name}", parameter) for name, parameter in model[number].named_parameters()]
        optimizer = torch.optim.AdamW(model[number].parameters(), lr=LR)
        passes = {"backward_passes_per_step": number // 2 + 1}
        made.append(hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression, **passes))
    try:
        compression.attach(*made)
    except hvc.ConfigError as error:
        return str(error)
    finally:
        compression.close()
    return ""


def less_often() -> str:
    """Only one of two optimizers makes a step; return what Horovod says in the next backward pass."""
    import horovod.torch as hvd

    model = net()
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    made = []
    for number in (1, 3):
        named = [(f"{number}.{name}", parameter) for name, parameter in model[number].named_parameters()]
        optimizer = torch.optim.SGD(model[number].parameters(), lr=LR)
        made.append(hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression))
    compression.attach(*made)
    try:
        for step in range(2):
            model(batch(step, rank())).square().mean().backward()
            made[0].step()
    except AssertionError as error:
        return str(error)
    finally:
        compression.close()
    return "accepted"


def loaded(*who: int) -> list[Any]:
    """In one step some of two optimizers load their state, in place of a step; return what is saved behind it."""
    import horovod.torch as hvd

    model = net()
    compression = hvc.Compression.topk(model.named_parameters(), timeout=20.0, min_elements=1)
    made = []
    for number in (1, 3):
        named = [(f"{number}.{name}", parameter) for name, parameter in model[number].named_parameters()]
        optimizer = torch.optim.SGD(model[number].parameters(), lr=LR)
        made.append(hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression))
    compression.attach(*made)
    for step in range(4):
        model(batch(step, rank())).square().mean().backward()
        for number, optimizer in enumerate(made):
            if step == 1 and number in who:
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                optimizer.step()
        for optimizer in made:
            optimizer.zero_grad()
    saved = compression.state_dict()["step"]
    compression.close()
    return [saved, digest(model.parameters())]


if not DDP:
    check("loaded", lambda: [loaded(*who) for who in ((), (0,), (1,), (0, 1))])
    check("less often", less_often)
    check("other passes", other_passes)


def in_a_list() -> list[str]:
    """Attach two optimizers as a list, and then as arguments; return what is said."""
    model = net()
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    made: list[Any] = [torch.optim.SGD(model[number].parameters(), lr=LR) for number in (1, 3)]
    if not DDP:
        import horovod.torch as hvd

        named = [[(n, p) for n, p in model.named_parameters() if n[0] == number] for number in "13"]
        made = [
            hvd.DistributedOptimizer(one, named_parameters=own, compression=compression)
            for one, own in zip(made, named, strict=True)
        ]
    found = []
    for given in ([made], [tuple(made)], made):
        try:
            found.append(type(compression.attach(*given)).__name__)
        except hvc.ConfigError as error:
            found.append(str(error))
    compression.close()
    return found


check("in a list", in_a_list)
WAYS = ("groups", "apart", "backwards", "one", *(() if DDP else ("repeated",)))
check("several", lambda: {way: several(way) for way in WAYS})
check("own", lambda: kept("Adafactor", second_moment="own"))
check("needs none", lambda: kept("Adafactor", "fp16"))


def late(name: str, method: str, attach: bool) -> dict[str, Any]:
    """The first layer is frozen when everything is made, and trained from the third step on."""
    model = net()
    model[1].requires_grad_(False)
    optimizer = plain(name, model)
    compression = hvc.Compression.create(method, model.named_parameters(), verify_every=1, timeout=20.0, warmup_steps=0)
    if DDP and not attach:
        called: Any = nn.parallel.DistributedDataParallel(model)
        called.register_comm_hook(compression, hvc.ddp_hook)
    elif attach:
        called, optimizer = trained(model, optimizer, compression)
    else:
        import horovod.torch as hvd

        called = model
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
    with told() as texts:
        train(called, optimizer, range(2))
        found = {"early": list(texts), "rested": digest(model[1].parameters())}
        model[1].requires_grad_(True)
        train(called, optimizer, range(2, 5))
    found |= {"told": [text for text in texts if "never reduced" in text], "late": digest(model[1].parameters())}
    compression.close()
    return found | {"exchanged": digest(model[3].parameters()), "all": digest(model.parameters())}


def alone(name: str) -> str:
    """Return the weights of the framework alone in the same training."""
    model = net()
    model[1].requires_grad_(False)
    called, optimizer = model, plain(name, model)
    if DDP:
        called = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    else:
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train(called, optimizer, range(2))
    model[1].requires_grad_(True)
    train(called, optimizer, range(2, 5))
    return digest(model.parameters())


for kind in ("SGD", "AdamW"):
    for attached in (False, True):
        check(f"late {kind} {attached}", lambda k=kind, a=attached: late(k, "marsit", a))  # type: ignore[misc]
    check(f"late {kind} none", lambda k=kind: late(k, "none", attach=True))  # type: ignore[misc]
    check(f"late {kind} alone", lambda k=kind: alone(k))  # type: ignore[misc]


def another_phase(anew: bool) -> tuple[list[str], str]:
    """Go on with another optimizer; return what is told of it, and the error of a second attach()."""
    model = net()
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    called, optimizer = trained(model, plain("AdamW", model), compression, {"warmup_steps": 2}, plain=True)
    with told() as texts:
        train(called, optimizer, range(4))
        other = plain("SGD", model) if anew else optimizer
        train(called, other, range(4, 16))
    try:
        compression.attach(other)
    except hvc.ConfigError as error:
        return [text for text in texts if "does not know it" in text], str(error)
    finally:
        compression.close()
    return [], "accepted"


def told_of_others(divided: bool, known: list[int]) -> list[str]:
    """Return what is told of the steps of two optimizers, of which the compression was given these.

    Args:
        divided: each has a part of the model; else both have all of it, and the second makes the steps.
    """
    model = net()
    each = [*model.parameters()]
    made = [torch.optim.AdamW(part, lr=LR) for part in ((each[:2], each[2:]) if divided else (each, each))]
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    compression.register(model, [made[number] for number in known])
    with told() as texts:
        for step in range(12):
            for one in made:
                one.zero_grad()
            model(batch(step, rank())).square().mean().backward()
            for one in made if divided else made[1:]:
                one.step()
    exact = compression.stats()["exact_steps"]
    compression.close()
    assert exact == 12
    return texts


if DDP:
    check("others beside", lambda: [told_of_others(True, known) for known in ([0], [0, 1])])
    check("others instead", lambda: [told_of_others(False, known) for known in ([0], [1])])


class OddState(torch.optim.SGD):
    """Keeps a number beside what it keeps of parameters, and of each one what is no mapping of tensors alone."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["name"] = "odd"
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index, call-overload, arg-type]
        return super().step(closure)


class SparseState(OddState):
    """Keeps a tensor of which no one element can be had."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.eye(2).to_sparse()
        return super().step(closure)


def taken_back(kind: str, method: str, way: str) -> list[str]:
    """Take some steps back, as after a learning-rate finder; return what is told.

    Args:
        way: what is loaded, in this order: the model and "o", the optimizer, and "c", the compression; or "same", for
            what the optimizer has, as programs do that set a rate; or "away", for nothing and then that, as those do
            that move it to another place meanwhile.
    """
    model = net()
    compression = hvc.Compression.create(method, model.named_parameters(), timeout=20.0)
    odd = {"OddState": OddState, "SparseState": SparseState}.get(kind)
    made = odd(model.parameters(), lr=LR, momentum=0.9) if odd else plain(kind, model)
    called, optimizer = trained(model, made, compression, {"warmup_steps": 2}, plain=DDP)
    with told() as texts:
        train(called, optimizer, range(4))
        saved = {"o": copy.deepcopy(optimizer.state_dict()), "c": compression.state_dict()}
        if set(way) <= {"o", "c"}:
            train(called, optimizer, range(9, 13))
        if way == "away":
            optimizer.load_state_dict({**saved["o"], "state": {}})
        for part in way if set(way) <= {"o", "c"} else "o":
            (optimizer if part == "o" else compression).load_state_dict(saved[part])
        train(called, optimizer, range(4, 8))
    compression.close()
    return [text for text in texts if "If the program took steps back" in text]


for kind, method in (
    ("AdamW", "marsit"), ("SGD", "topk"), ("OddState", "topk"), ("SparseState", "topk"), ("AdamW", "bf16"),
    ("AdamW", "none"),
):  # fmt: skip
    ways = ("o", "oc", "co", "same", "away")
    check(
        f"taken back {kind} {method}",
        lambda k=kind, m=method, ways=ways: {way: taken_back(k, m, way) for way in ways},  # type: ignore[misc]
    )


def sparse_first() -> list[str]:
    """Let the optimizer of a sparse embedding make its steps before that of the rest; return what is told."""
    import horovod.torch as hvd

    torch.manual_seed(1)
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(50, 8, sparse=True), "rest": nn.Linear(8, 4)})
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    made = {"bag": torch.optim.SparseAdam(model["bag"].parameters(), lr=LR), "rest": plain("AdamW", model["rest"])}
    both = [
        hvd.DistributedOptimizer(one, [(f"{name}.{n}", p) for n, p in model[name].named_parameters()], compression)
        for name, one in made.items()
    ]
    compression.attach(*both, warmup_steps=2)
    with told() as texts:
        for step in range(16):
            generator = torch.Generator().manual_seed(2 * step + rank())
            for one in both:
                one.zero_grad()
            model["rest"](model["bag"](torch.randint(50, (16, 5), generator=generator))).square().mean().backward()
            for one in both:
                one.step()
    compression.close()
    return texts


if not DDP:
    check("sparse first", sparse_first)


def local_step_of_another() -> list[str]:
    """Let another optimizer make a step with this rank's gradients, and drop results later; return what is told."""
    model = net()
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    called, optimizer = trained(model, plain("AdamW", model), compression, {"warmup_steps": 2}, plain=True)
    with told() as texts:
        train(called, optimizer, range(4))
        with compression.no_sync():  # type: ignore[attr-defined]
            train(called, plain("SGD", model), range(4, 5))
        for step in range(5, 21):
            train(called, optimizer, range(step, step + 1))
            called(batch(step, rank())).square().mean().backward()
    compression.close()
    return texts


if DDP:
    check("another phase", lambda: [another_phase(anew) for anew in (True, False)])
    check("local step of another", local_step_of_another)


def thawed_between() -> str:
    """A parameter that needs a gradient only after the compression was made, when the rest is."""
    model = net()
    model[1].requires_grad_(False)
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    model[1].requires_grad_(True)
    try:
        train(*trained(model, plain("SGD", model), compression), range(1))
    except hvc.ConfigError as error:
        return str(error)
    finally:
        compression.close()
    return "accepted"


check("thawed between", thawed_between)


def sharded(kind: type, share: bool, **options: Any) -> str:
    """Give the compression a ZeroRedundancyOptimizer, or the optimizer inside it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=LR)
    compression = hvc.Compression.create(options.pop("method", "marsit"), model.named_parameters(), timeout=20.0)
    called = nn.parallel.DistributedDataParallel(model)
    try:
        compression.register(called, optimizer.optim if share else optimizer, **options)
        train(called, optimizer, range(3))
    except hvc.ConfigError as error:
        return str(error)
    finally:
        compression.close()
    return digest(model.parameters())


if DDP:
    check("zero", lambda: sharded(torch.optim.AdamW, share=False))
    check("share of zero", lambda: sharded(torch.optim.AdamW, share=True))
    check("zero, own", lambda: sharded(torch.optim.AdamW, share=False, second_moment="own"))
    check("zero, fp16", lambda: sharded(torch.optim.AdamW, share=False, method="fp16"))
    check("zero, SGD", lambda: sharded(torch.optim.SGD, share=False))


def different(named: bool) -> str:
    """Each rank attaches an optimizer of other parameters, as one that shards its state does."""
    model = net()
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    called = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model[1 + 2 * (rank() if named else 0)].parameters(), lr=LR)
    try:
        compression.register(called, optimizer)
        train(called, optimizer, range(1))
    except hvc.MismatchError as error:
        return str(error)
    finally:
        compression.close()
    return "accepted"


if DDP:
    check("different", lambda: different(True))
    check("the same", lambda: different(False))
