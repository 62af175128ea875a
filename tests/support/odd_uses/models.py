"""Models of odd parts: shared, empty, complex, of several types, sparse, or changed in mid-training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .run import At, Run, case, data, each_step, simple, small


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


@each_step()
def other_type_later(at: At) -> None:
    if at.step == 2:
        at.model.double()
    kind = next(at.model.parameters()).dtype
    at.called(data(at.step).to(kind)).square().mean().backward()
    at.optimizer.step()


@case
def weights_swapped(run: Run) -> nn.Module:
    def before(model: Any, step: int) -> None:
        for p in model.parameters():
            p.data = p.data.clone()

    return simple(small(), run, before=before)


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
