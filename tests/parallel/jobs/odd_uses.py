"""What programs do with gradients beside the usual: each way of use beside the framework alone, on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start
from tests.support.nets import digest
from tests.support.rank import arguments, check, rank

start()
torch.set_num_threads(1)
LR, STEPS, LONG = 0.05, 4, 20.0

if DDP:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
else:
    import horovod.torch as hvd


class Run:
    """One training: with a method, or the framework alone."""

    def __init__(self, way: str, method: str | None, number: int, name: str = "") -> None:
        self.way, self.method, self.name = way, method, f"{name}{number}{way}{method}."
        self.compressions: list[Any] = []

    def start(self, model: nn.Module, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
        """Return what is called, and the optimizer."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0)
        named = [(self.name + name, p) for name, p in model.named_parameters()]
        compression = None
        if self.method:
            more = {"verify_every": 1, "timeout": LONG, "min_elements": 1, "warmup_steps": 0}
            compression = hvc.Compression.create(self.method, named, **more)
            self.compressions.append(compression)
        if not DDP:
            given = compression or hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=given, **options)
            if compression and self.way == "attached":
                compression.attach(optimizer)
            return model, optimizer
        called = (
            model
            if compression and self.way == "plain"
            else DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
        )
        if compression:
            compression.register(called, optimizer)
        return called, optimizer

    def close(self) -> None:
        for compression in self.compressions:
            compression.close()


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 6)), generator=torch.Generator().manual_seed(100 * step + rank()))


def small(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))


def loss_of(model: Any, step: int) -> Tensor:
    return model(data(step)).square().mean()


CASES: dict[str, Callable[[Run], nn.Module]] = {}


def case(function: Callable[[Run], nn.Module]) -> Callable[[Run], nn.Module]:
    CASES[function.__name__.replace("_", " ").strip()] = function
    return function


def simple(
    model: nn.Module, run: Run, loss: Any = loss_of, steps: int = STEPS, set_to_none: bool = True, before: Any = None
) -> nn.Module:
    called, optimizer = run.start(model)
    for step in range(steps):
        model.zero_grad(set_to_none=set_to_none)
        if before:
            before(model, step)
        loss(called, step).backward()
        optimizer.step()
    return model


@case
def usual(run: Run) -> nn.Module:
    return simple(small(), run)


@case
def zeroed_in_place(run: Run) -> nn.Module:
    return simple(small(), run, set_to_none=False)


@case
def views_of_one_buffer(run: Run) -> nn.Module:
    model = small()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def before(model: nn.Module, step: int) -> None:
        at = 0
        flat.zero_()
        for p in model.parameters():
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()

    return simple(model, run, before=before)


@case
def transposed_gradients(run: Run) -> nn.Module:
    def before(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            if p.dim() == 2:
                p.grad = torch.zeros(p.shape[::-1]).t()

    return simple(small(), run, before=before)


@case
def strided_gradients(run: Run) -> nn.Module:
    def before(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            p.grad = torch.zeros(*p.shape, 2)[..., 0]

    return simple(small(), run, before=before)


@case
def expanded_gradients(run: Run) -> nn.Module:
    model = small()
    _, optimizer = run.start(model)
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = torch.tensor(float(step + rank())).expand_as(p)
        optimizer.step()
    return model


@case
def one_gradient_of_two(run: Run) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _, optimizer = run.start(model)
    for step in range(STEPS):
        for a, b in zip(model[0].parameters(), model[1].parameters(), strict=True):
            a.grad = b.grad = torch.full_like(a, float(step + rank()))
        optimizer.step()
    return model


@case
def filled_by_hand(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        grads = torch.autograd.grad(loss_of(called, step), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        optimizer.step()
    return model


@case
def replaced_gradients(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        for p in model.parameters():
            p.grad = p.grad.clone()
        optimizer.step()
    return model


@case
def replaced_and_halved(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        if not DDP:
            optimizer.synchronize()
        for p in model.parameters():
            p.grad = p.grad * 0.5
        with contextlib.nullcontext() if DDP else optimizer.skip_synchronize():
            optimizer.step()
    return model


@case
def removed_gradients(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        model[0].weight.grad = None
        optimizer.step()
    return model


@case
def zeroed_between(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        loss_of(called, step).backward()
        model.zero_grad()
        optimizer.step()
    return model


@case
def optimizer_zeroed_between(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        loss_of(called, step).backward()
        optimizer.zero_grad()
        optimizer.step()
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.own = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.second(torch.tanh(self.first(x))).tanh())


@case
def tied_weights(run: Run) -> nn.Module:
    return simple(Tied(), run)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.one(x).tanh())


@case
def a_module_used_twice(run: Run) -> nn.Module:
    return simple(Twice(), run)


@case
def a_model_called_twice(run: Run) -> nn.Module:
    return simple(small(), run, loss=lambda model, step: loss_of(model, step) + loss_of(model, step + 50))


@case
def flipped(run: Run) -> nn.Module:
    def before(model: Any, step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)

    return simple(small(), run, before=before, steps=5)


@case
def gradient_penalty(run: Run) -> nn.Module:
    def loss(model: Any, step: int) -> Tensor:
        given = data(step).requires_grad_(True)
        out = model(given).square().mean()
        (g,) = torch.autograd.grad(out, given, create_graph=True)
        return out + g.square().sum()

    return simple(small(), run, loss=loss)


@case
def penalty_of_parameters(run: Run) -> nn.Module:
    def loss(model: Any, step: int) -> Tensor:
        out = model(data(step)).square().mean()
        grads = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        return out + sum(g.square().sum() for g in grads)

    return simple(small(), run, loss=loss)


@case
def create_graph(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(called, step).backward(create_graph=True)
        optimizer.step()
    return model


@case
def double_backward_over_create_graph(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(called, step).backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        optimizer.step()
    return model


@case
def backward_twice(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(called, step)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    return model


@case
def two_passes_in_one_step(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        loss_of(called, step + 50).backward()
        optimizer.step()
    return model


@case
def never_zeroed(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        loss_of(called, step).backward()
        optimizer.step()
    return model


@case
def a_step_without_backward_first(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    optimizer.step()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        optimizer.step()
    return model


@case
def a_step_without_backward_between(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step != 2:
            loss_of(called, step).backward()
        optimizer.step()
    return model


@case
def two_steps_of_one_backward(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        optimizer.step()
        optimizer.step()
    return model


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.scale, self.none = (
            nn.Linear(6, 6),
            nn.Parameter(torch.tensor(0.5)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.none


@case
def scalars(run: Run) -> nn.Module:
    return simple(Scalars(), run)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.empty = nn.Linear(6, 6), nn.Parameter(torch.empty(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.empty.sum()


@case
def no_elements(run: Run) -> nn.Module:
    return simple(Empty(), run)


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


@case
def nothing_but_no_elements(run: Run) -> nn.Module:
    return simple(OnlyEmpty(), run)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.inner).abs()


@case
def complex_numbers(run: Run) -> nn.Module:
    return simple(Complex(), run)


@case
def channels_last(run: Run) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)

    def loss(model: Any, step: int) -> Tensor:
        return model(data(step, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last)).square().mean()

    return simple(model, run, loss=loss)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6).to(torch.bfloat16), nn.Linear(6, 6).to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).to(torch.bfloat16)).to(torch.float64))


@case
def mixed_types(run: Run) -> nn.Module:
    return simple(Mixed(), run)


@case
def bfloat16(run: Run) -> nn.Module:
    return simple(
        small().to(torch.bfloat16), run, loss=lambda m, s: m(data(s).to(torch.bfloat16)).float().square().mean()
    )


@case
def half(run: Run) -> nn.Module:
    return simple(small().half(), run, loss=lambda m, s: m(data(s).half()).float().square().mean())


@case
def autocast(run: Run) -> nn.Module:
    def loss(model: Any, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(data(step)).float().square().mean()

    return simple(small(), run, loss=loss)


@case
def inference_between(run: Run) -> nn.Module:
    model = small()

    def loss(called: Any, step: int) -> Tensor:
        found = loss_of(called, step)
        with torch.inference_mode():
            model.eval()
            model(data(step))
            model.train()
        return found

    return simple(model, run, loss=loss)


@case
def hooks_of_tensors(run: Run) -> nn.Module:
    model = small()
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
    return simple(model, run)


@case
def an_error_in_backward_on_all_ranks(run: Run) -> nn.Module:
    return _interrupted(run, True)


@case
def an_error_in_backward_on_one_rank(run: Run) -> nn.Module:
    return _interrupted(run, rank() == 1)


def _interrupted(run: Run, here: bool) -> nn.Module:
    model, fails = small(), [here]

    def fail(grad: Tensor) -> None:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("no luck")

    called, optimizer = run.start(model)
    model[0].weight.register_hook(fail)
    for step in range(STEPS):
        for _ in range(2):
            try:
                optimizer.zero_grad()
                loss_of(called, step).backward()
                break
            except RuntimeError as error:
                if "no luck" not in str(error):
                    raise
        optimizer.step()
    return model


@case
def lbfgs(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(called, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@case
def closure_of_adam(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(called, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@case
def other_type_later(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 2:
            model.double()
        called(data(step).to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
    return model


@case
def weights_swapped(run: Run) -> nn.Module:
    def before(model: Any, step: int) -> None:
        for p in model.parameters():
            p.data = p.data.clone()

    return simple(small(), run, before=before)


@case
def backward_of_some_inputs(run: Run) -> nn.Module:
    model = small()
    called, optimizer = run.start(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward(inputs=[model[2].weight, model[2].bias])
        optimizer.step()
    return model


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(30, 6, sparse=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 10).long() % 30
        return self.out(self.words(words).mean(1))


@case
def sparse_gradients(run: Run) -> nn.Module:
    return simple(Sparse(), run)


@case
def sparse_gradients_zeroed_in_place(run: Run) -> nn.Module:
    return simple(Sparse(), run, set_to_none=False)


@case
def sparse_then_dense(run: Run) -> nn.Module:
    def before(model: Any, step: int) -> None:
        model.words.sparse = step < 2

    return simple(Sparse(), run, before=before)


@case
def dense_then_sparse(run: Run) -> nn.Module:
    def before(model: Any, step: int) -> None:
        model.words.sparse = step >= 2

    model = Sparse()
    model.words.sparse = False
    return simple(model, run, before=before)


def ranks_have(value: Any) -> list[Any]:
    if DDP:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found
    return hvd.allgather_object(value)


def play(name: str, way: str, method: str | None, number: int) -> Any:
    run = Run(way, method, number, name)
    try:
        model = CASES[name](run)
        return [p.detach().clone() for p in model.parameters()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()


def one(name: str, way: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    alone = "left out" if "one rank" in name else play(name, way, None, number)
    ours = play(name, way, "none", number)
    lossy = play(name, way, "marsit", number)
    for label, value in (("alone", alone), ("none", ours), ("marsit", lossy)):
        found[label] = (
            value if isinstance(value, str) else digest([torch.view_as_real(v) if v.is_complex() else v for v in value])
        )
    if not isinstance(alone, str) and not isinstance(ours, str):
        found["far"] = max(
            (float((a.double() - b.double()).abs().max()) for a, b in zip(alone, ours, strict=True) if a.numel()),
            default=0.0,
        )
    return found


given = arguments()
for number, name in enumerate(CASES):
    if not given.get("only") or name in given["only"]:
        for way in given["ways"]:
            if "one rank" not in name or way == "plain":  # with the others, the ranks that are left wait for a timeout
                check(f"{name} / {way}", lambda name=name, way=way, number=number: one(name, way, number))
