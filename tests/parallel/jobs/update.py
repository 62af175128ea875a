"""Weight updates exchanged instead of gradients, with every method."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from tests.support.rank import arguments, check
from tests.support.samples import samples
from tests.support.training import batch, digest, farthest, gathered, net, optimizer_for, train, weights

hvd.init()
torch.set_num_threads(1)
RANK = hvd.rank()


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))


def wrapped(
    model: nn.Module,
    method: str,
    kind: str = "sgd",
    delay: int | None = None,
    mode: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, hvc.Compression]:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
        "plain": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-3),
    }
    named = list(model.named_parameters())
    compression = hvc.Compression.create(method, named, **{"verify_every": 1, "timeout": 20.0} | options)
    return hvc.DistributedUpdateOptimizer(
        makers[kind](model.parameters()), named, compression, delay, **mode or {}
    ), compression


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step, RANK)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def all_alike(model: nn.Module) -> bool:
    return len(set(gathered(digest(model.parameters())))) == 1


def every_method(method: str, sample: dict[str, Any], kind: str) -> dict[str, Any]:
    model = normed()
    optimizer, compression = wrapped(model, method, kind, 2, {"warmup_steps": 2} if kind == "adam" else None, **sample)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    alike = []
    for step in range(8):
        one_step(model, optimizer, step)
        schedule.step()
        alike.append(all_alike(model))
    stats = compression.stats()
    compression.close()
    lr = optimizer.param_groups[0]["lr"] / optimizer.defaults["lr"]
    return {"alike": alike, "lr": lr, "verified": stats["verified"] == stats["steps"] > 0,
            "moved": farthest(weights(model), weights(normed()))}  # fmt: skip


def as_gradients() -> float:
    """Updates are linear in gradients with SGD: the mean update is that of the mean gradient."""
    stock, ours = net(), net()
    optimizer, compression = optimizer_for(stock, "none", attach=True)
    train(stock, optimizer, range(4))
    compression.close()
    named = list(ours.named_parameters())
    compression = hvc.Compression.none(named)
    plain = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    train(ours, hvc.DistributedUpdateOptimizer(plain, named, compression), range(4))
    compression.close()
    assert farthest(weights(ours), weights(net())) > 1e-4
    return farthest(weights(stock), weights(ours))


def resumed(kind: str) -> bool:
    """6 steps = 4 steps (with Adam in the middle of a delay, as one is the warm-up) + save + load + 2 steps."""

    def run(steps: range, saved: dict[str, Any] | None) -> dict[str, Any]:
        model = normed()
        optimizer, compression = wrapped(model, "marsit", kind, 2, {"warmup_steps": 1}, full_precision_every=2)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            compression.load_state_dict(saved["compression"])
        for step in steps:
            one_step(model, optimizer, step)
        found = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "compression": compression.state_dict(),
        }
        compression.close()
        return {name: {**part} for name, part in found.items()}

    whole = run(range(6), None)
    again = run(range(4, 6), run(range(4), None))
    return digest(whole["model"].values()) == digest(again["model"].values())


def second_moment() -> dict[str, Any]:
    """It is the same on every rank, and moves in full-precision rounds only; the first moment is not."""
    model = net()
    optimizer, compression = wrapped(model, "marsit", "adam", 1, {"warmup_steps": 3}, full_precision_every=4)
    second, first = [], []
    for step in range(12):
        one_step(model, optimizer, step)
        second.append(gathered(digest(moments(optimizer))))
        first.append(gathered(digest(s["exp_avg"] for s in optimizer.state.values())))
    compression.close()
    moved = [a[0] != b[0] for a, b in pairwise(second)]
    return {"shared": all(len(set(s)) == 1 for s in second), "own": len(set(first[-1])), "moved": moved}


def moments(optimizer: Any) -> list[torch.Tensor]:
    """Return the second moments that are held; in the warm-up the optimizer's own, without their bias."""
    held = optimizer.state_dict()["horovod_compress"]["second_moment"]["moments"].values()
    own = [state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"])) for state in optimizer.state.values()]
    return [saved["moment"] for saved in held] or own


def adam_learns(method: str) -> list[float]:
    """Return the loss over all ranks at the start and at the end: outputs are to become some of the inputs."""
    model, losses = net(), []
    optimizer, compression = wrapped(model, method, "adam", 1, {"second_moment": "shared", "warmup_steps": 10})
    for step in range(60):
        optimizer.zero_grad()
        inputs = batch(step, RANK)
        loss = (model(inputs) - inputs.flatten(1)[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    compression.close()
    means = [sum(of_step) / len(of_step) for of_step in zip(*gathered(losses), strict=True)]
    return [sum(part) / len(part) for part in (means[:5], means[-5:])]


def masked() -> dict[str, int]:
    """Momentum is empty where this rank's update was sent, and only there."""
    left = {}
    for masking in (True, False):
        model = net()
        options = {"density": 0.05, "schedule": "single"}
        optimizer, compression = wrapped(model, "sparse_binary", mode={"momentum_masking": masking}, **options)
        for step in range(3):
            one_step(model, optimizer, step)
        left[str(masking)] = sum(int((s["momentum_buffer"] == 0).sum()) for s in optimizer.state.values())
        compression.close()
    return left


def not_finite(nonfinite: str) -> dict[str, Any]:
    model = net()
    optimizer, compression = wrapped(model, "marsit", nonfinite=nonfinite)
    one_step(model, optimizer, 0)
    before = weights(model)
    model(batch(1, RANK)).square().mean().backward()
    if RANK == 1:
        next(model.parameters()).grad.fill_(float("nan"))
    error = caught(optimizer.step)
    same = farthest(weights(model), before)
    compression.close()
    return {"error": error, "from before": same, "alike": all_alike(model)}


def caught(what: Any) -> str | None:
    """Return the error of a call, or None."""
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def not_finite_in_warmup() -> dict[str, Any]:
    model = net()
    optimizer, compression = wrapped(model, "marsit", "adam")
    one_step(model, optimizer, 0)
    before = weights(model)
    model(batch(1, RANK)).square().mean().backward()
    if RANK == 1:
        next(model.parameters()).grad.fill_(float("nan"))
    error = caught(optimizer.step)
    compression.close()
    return {"error": error, "from before": farthest(weights(model), before), "alike": all_alike(model)}


def interrupted() -> float:
    """Whatever ends an exchange, the weights are weights."""
    model = net()
    optimizer, compression = wrapped(model, "none")
    one_step(model, optimizer, 0)
    before = weights(model)

    def result(*given: Any) -> None:
        raise KeyboardInterrupt

    compression._session.reducer.result = result
    try:
        one_step(model, optimizer, 1)
    except KeyboardInterrupt:
        hvd.barrier()  # the others have finished the exchange too
        compression.close()
        return farthest(weights(model), before)
    raise AssertionError("not interrupted")


class Odd(nn.Module):
    """What weights can be like: channels last, transposed, tied, frozen, unused, rarely used, 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(144, 16), nn.Linear(16, 16, bias=False)
        self.second.weight = nn.Parameter(self.second.weight.detach().t())
        self.tied = self.second
        self.frozen, self.unused = nn.Linear(16, 16), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.words = nn.Embedding(50, 16)
        self.narrow = nn.Linear(16, 16).to(torch.bfloat16)

    def forward(self, step: int) -> torch.Tensor:
        image = torch.randn(8, 2, 8, 8, generator=torch.Generator().manual_seed(100 * step + RANK))
        x = self.first(self.conv(image).flatten(1)) + self.words(torch.arange(8) + 3 * step)
        x = self.tied(self.second(x).tanh()) + self.frozen(x)
        return self.narrow(x.to(torch.bfloat16)).float().square().mean()


def odd(method: str, kind: str) -> dict[str, Any]:
    model = Odd()
    optimizer, compression = wrapped(
        model, method, kind, 2, {"warmup_steps": 2} if kind == "adam" and method == "marsit" else None
    )
    before, losses = weights(model), []
    for step in range(8):
        optimizer.zero_grad()
        loss = model(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    compression.close()
    names = [name for name, _ in model.named_parameters()]
    moved = {n: float((a - b).abs().max()) for n, a, b in zip(names, weights(model), before, strict=True)}
    return {"moved": moved, "alike": all_alike(model), "losses": losses}


def scaler() -> dict[str, Any]:
    """A gradient scaler skips the step of one rank; the ranks stay together."""
    model = net()
    optimizer, compression = wrapped(model, "none", "sgd", 2)
    scale = torch.amp.GradScaler("cpu", init_scale=8.0)
    alike = []
    for step in range(6):
        optimizer.zero_grad()
        scale.scale(model(batch(step, RANK)).square().mean()).backward()
        if RANK == 1 and step == 2:
            next(model.parameters()).grad.fill_(float("inf"))
        scale.step(optimizer)
        scale.update()
        alike.append(all_alike(model))
    compression.close()
    return {"alike": alike, "scale": scale.get_scale(), "finite": all(bool(w.isfinite().all()) for w in weights(model))}


def rolled_back() -> float:
    """Loading in the same process is as good as in a new one."""
    model = net()
    optimizer, compression = wrapped(model, "marsit", "adam", 1, {"warmup_steps": 2, "rebuild_every": 1})
    for step in range(4):
        one_step(model, optimizer, step)
    saved = copy.deepcopy({"m": model.state_dict(), "o": optimizer.state_dict(), "c": compression.state_dict()})
    found = []
    for _ in range(2):
        model.load_state_dict(saved["m"])
        optimizer.load_state_dict(copy.deepcopy(saved["o"]))
        compression.load_state_dict(saved["c"])
        for step in range(4, 7):
            one_step(model, optimizer, step)
        found.append(weights(model))
    compression.close()
    return farthest(*found)


def flushed() -> list[bool]:
    model = net()
    optimizer, compression = wrapped(model, "sparse_binary", "sgd", 5)
    found = []
    for step in range(3):
        one_step(model, optimizer, step)
    found.append(all_alike(model))
    optimizer.flush()
    found.append(all_alike(model))
    before = weights(model)
    optimizer.flush()
    found.append(farthest(weights(model), before) == 0)
    compression.close()
    return found


def different_starts() -> str | None:
    model = net(seed=RANK)
    optimizer, compression = wrapped(model, "none")
    error = caught(lambda: one_step(model, optimizer, 0))
    compression.close()
    return error


def different_options() -> str | None:
    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.none(named)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    error = caught(lambda: hvc.DistributedUpdateOptimizer(sgd, named, compression, 1 + RANK % 2))
    compression.close()
    return error


def closure_and_hooks() -> dict[str, Any]:
    model = net()
    optimizer, compression = wrapped(model, "marsit", "adam", 1, {"warmup_steps": 1})
    calls = []
    optimizer.register_step_post_hook(lambda *given: calls.append(1))
    losses = []
    for _ in range(3):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(0, RANK)).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    compression.close()
    return {"losses": losses, "calls": len(calls)}


def clipped_by_a_hook() -> bool:
    """A hook that clips gradients, registered after everything else: squares stay squares, weights numbers."""
    model = net()
    optimizer, compression = wrapped(model, "marsit", "adam", 1, {"warmup_steps": 2})

    def clip(*given: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1e-4)  # type: ignore[union-attr]

    for step in range(8):
        if step == 4:
            optimizer.register_step_pre_hook(clip)
        one_step(model, optimizer, step)
    compression.close()
    squares = [state["exp_avg_sq"] for state in optimizer.state.values()]
    return all(bool(s.ge(0).all()) for s in squares) and all(bool(p.isfinite().all()) for p in model.parameters())


def refusals() -> list[str]:
    found = []

    def refuse(make: Any) -> None:
        try:
            make()
            found.append("accepted")
        except hvc.ConfigError as error:
            found.append(str(error))

    model = net()
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvc.Compression.marsit(named)
    make = hvc.DistributedUpdateOptimizer
    refuse(lambda: make(hvd.DistributedOptimizer(sgd, named), named, compression))
    refuse(lambda: make(sgd, named, compression, 0))
    refuse(lambda: make(sgd, named, compression, second_moment="shared"))
    refuse(lambda: make(torch.optim.SGD(list(model.parameters())[:2], lr=0.1), named, compression))
    refuse(lambda: make(sgd, list(net().named_parameters()), compression))
    refuse(lambda: make(torch.optim.LBFGS(model.parameters()), named, compression))
    optimizer = make(sgd, named, compression)
    refuse(lambda: make(torch.optim.SGD(model.parameters(), lr=0.1), named, compression))
    refuse(lambda: optimizer.load_state_dict(sgd.state_dict()))
    refuse(lambda: compression.compress(torch.zeros(3)))
    refuse(lambda: optimizer.add_param_group({"params": []}))
    for one in (optimizer, sgd):
        refuse(lambda one=one: hvd.broadcast_optimizer_state(one, 0))
    compression.close()
    zero = hvc.Compression.marsit(named, nonfinite="zero")
    refuse(lambda: make(torch.optim.SGD(model.parameters(), lr=0.1), named, zero))
    zero.close()
    pruned = hvc.Compression.create(hvc.masked("marsit"), named)
    refuse(lambda: make(torch.optim.SGD(model.parameters(), lr=0.1), named, pruned))
    pruned.close()
    return found


for sample in samples(few=arguments()["few"]):
    method, options, number = sample.method, sample.options, sample.number
    heavy = options.get("momentum", method == "dgc") or options.get("beta", method == "signum")
    kind = "plain" if heavy else "adam" if number % 2 else "sgd"
    check(f"{method} {number}", lambda: every_method(method, options, kind))
check("as gradients", as_gradients)
check("resumed sgd", lambda: resumed("sgd"))
check("resumed adam", lambda: resumed("adam"))
check("second moment", second_moment)
for method in ("none", "onebit_adam"):
    check(f"adam learns with {method}", lambda: adam_learns(method))
check("masked", masked)
for policy in ("propagate", "raise"):
    check(f"not finite {policy}", lambda: not_finite(policy))
check("not finite in warm-up", not_finite_in_warmup)
check("interrupted", interrupted)
for method, kind in (("marsit", "adam"), ("sparse_binary", "sgd"), ("sketch_fusion", "adam")):
    check(f"odd {method}", lambda: odd(method, kind))
for name, case in (("scaler", scaler), ("rolled back", rolled_back), ("flushed", flushed), ("starts", different_starts),
                   ("options", different_options), ("closure", closure_and_hooks),
                   ("clipped by a hook", clipped_by_a_hook)):  # fmt: skip
    check(name, case)
check("refusals", refusals)
