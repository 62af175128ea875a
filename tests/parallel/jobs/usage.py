"""The ways in which Horovod's optimizer is used, on both paths, beside Horovod alone."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from horovod_compress.codecs.dense import FullPrecision
from tests.support.jobs import ROOT
from tests.support.logs import told
from tests.support.rank import check, refusal
from tests.support.training import (
    Words,
    digest,
    farthest,
    gathered,
    loss_of,
    net,
    optimizer_for,
    train,
    weights,
    word_loss,
)

hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
PATHS: list[tuple[str | None, bool]] = [
    (None, False),
    ("none", False),
    ("none", True),
    ("marsit", False),
    ("marsit", True),
]
MARSIT = dict(full_precision_every=3, compensation="global", schedule="size:10KB")

Play = Callable[[str | None, bool], list[Tensor]]


def compare(play: Play) -> dict[str, Any]:
    """Play one way of use with Horovod alone, and with two methods on both paths."""
    found = {path: play(*path) for path in PATHS}
    alone = found[None, False]
    return {
        "none": max(farthest(alone, found["none", attach]) for attach in (False, True)),
        "marsit": farthest(alone, found["marsit", True]),
        "same paths": all(digest(found[method, False]) == digest(found[method, True]) for method in ("none", "marsit")),
        "same ranks": all(len(set(gathered(digest(found[path])))) == 1 for path in PATHS),
        "moved": farthest(alone, weights(net())) if len(alone) == 6 and alone[0].dim() == 4 else None,
    }


def options_of(method: str | None) -> dict[str, Any]:
    return MARSIT if method == "marsit" else {}


def playing(
    make: Callable[[], nn.Module] = net,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
    passes: int = 1,
    **hvd_options: Any,
) -> Play:
    def play(method: str | None, attach: bool) -> list[Tensor]:
        model = make()
        given = {name: value(model) if callable(value) else value for name, value in hvd_options.items()}
        optimizer, compression = optimizer_for(model, method, attach, **given, **options_of(method))
        train(model, optimizer, range(4), loss, passes)
        if compression:
            assert compression.stats()["verified"] == compression.stats()["steps"] == 4
            compression.close()
        return weights(model)

    return play


def two_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [parameters[:2], parameters[2:5]]


check("groups", lambda: compare(playing(groups=two_groups)))
check("num_groups", lambda: compare(playing(num_groups=2)))
check("two passes", lambda: compare(playing(passes=2, backward_passes_per_step=2)))
check("predivide", lambda: compare(playing(gradient_predivide_factor=2.0)))
check("sum", lambda: compare(playing(op=hvd.Sum)))


def in_dtype(dtype: torch.dtype, methods: list[str | None]) -> dict[str, Any]:
    play = playing(lambda: net(dtype), lambda model, step: loss_of(model, step, dtype))
    found = {(m, a): play(m, a) for m in methods for a in ((False, True) if m else (False,))}
    paths = all(digest(found[m, False]) == digest(found[m, True]) for m in methods if m)
    ranks = all(len(set(gathered(digest(value)))) == 1 for value in found.values())
    alone = found[None, False] if None in methods else found["none", True]
    return {"none": farthest(alone, found["none", False]), "same paths": paths, "same ranks": ranks}


check("float64", lambda: in_dtype(torch.float64, [None, "none", "marsit"]))
check("bfloat16", lambda: in_dtype(torch.bfloat16, ["none", "marsit"]))  # Horovod alone refuses it


class Branches(nn.Module):
    """Two branches; the rank decides which is used, or in which order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.shared = nn.Linear(64, 64)


def some_unused(model: nn.Module, step: int) -> Tensor:
    from tests.support.training import batch

    x = model.shared(batch(step, RANK).flatten(1))
    branch = model.first if (RANK + step) % 2 else model.second
    return branch(x.tanh()).square().mean()


def other_order(model: nn.Module, step: int) -> Tensor:
    from tests.support.training import batch

    x = batch(step, RANK).flatten(1)
    layers = [model.first, model.second, model.shared]
    for layer in (layers[RANK % 3 :] + layers[: RANK % 3])[:: 1 if step % 2 else -1]:
        x = layer(x).tanh()
    return x.square().mean()


check("unused on some ranks", lambda: compare(playing(Branches, some_unused)))
check("other hook order", lambda: compare(playing(Branches, other_order)))


def clipped(method: str | None, attach: bool) -> list[Tensor]:
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, **options_of(method))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    if compression:
        assert compression.stats()["steps"] == 4
        compression.close()
    return weights(model)


check("clipping", lambda: compare(clipped))


def left_out(how: str) -> Play:
    """Return a training that leaves the second step out, behind its exchange, and goes on in an odd way."""

    def play(method: str | None, attach: bool) -> list[Tensor]:
        model = net()
        optimizer, compression = optimizer_for(model, method, attach, **options_of(method))
        for step in range(5):
            model.zero_grad(set_to_none=how != "cleared in place")
            if how == "by hand" and step == 2:
                for parameter, grad in zip(
                    model.parameters(), torch.autograd.grad(loss_of(model, step), [*model.parameters()]), strict=True
                ):
                    parameter.grad = grad
            elif step != 2 or not RANK:  # with the others, rank 0 alone has a gradient
                loss_of(model, step).backward()
            if step == 1:
                optimizer.synchronize()
            else:
                optimizer.step()
        if compression:
            assert compression.stats()["steps"] == 5
            compression.close()
        return weights(model)

    return play


for odd in ("cleared", "cleared in place", "by hand"):
    check(f"left out, then {odd}", lambda: compare(left_out(odd)))


def in_a_closure(method: str | None, attach: bool) -> list[Tensor]:
    """The gradients come, and are exchanged, within each step: also within the first one."""
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, **options_of(method))
    for step in range(4):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.synchronize()
            return loss

        with optimizer.skip_synchronize():
            optimizer.step(closure)
    if compression:
        compression.close()
    return weights(model)


check("closure", lambda: [digest(in_a_closure("topk", attach)) for attach in (False, True)])


def warnings_of(train_once: Callable[[bool], object]) -> list[str]:
    """Return what this package warns of in a training of one step, on both paths."""
    with told() as texts:
        for attach in (False, True):
            train_once(attach)
    return texts


def one_pass_of_two(attach: bool) -> None:
    """The first step comes before Horovod hands anything over: it waits for another pass."""
    model = net()
    optimizer, compression = optimizer_for(model, "marsit", attach, backward_passes_per_step=2)
    loss_of(model, 0).backward()
    optimizer.step()
    assert compression and compression.stats()["steps"] == 1
    compression.close()


def sparse_only(attach: bool) -> None:
    model = nn.Embedding(8, 4, sparse=True)
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=20.0)
    inner = torch.optim.SparseAdam(model.parameters())
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
    if attach:
        compression.attach(optimizer)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor([step, RANK])).square().sum().backward()
        optimizer.step()
    compression.close()


check("no warnings", lambda: warnings_of(one_pass_of_two) + warnings_of(sparse_only))


def with_more_than_the_optimizer_has() -> str:
    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.none(named, timeout=20.0)
    few = hvd.DistributedOptimizer(
        torch.optim.SGD(model[-1].parameters(), 0.1),  # type: ignore[index]
        named_parameters=named,
        compression=compression,
    )
    try:
        compression.attach(few)
    except hvc.ConfigError as error:
        return str(error)
    finally:
        compression.close()
    return "accepted"


def replaced(attach: bool) -> list[str]:
    """Behind synchronize(), a program replaces gradients: results or not, they are exchanged."""
    model = net()
    optimizer, compression = optimizer_for(model, "topk", attach)
    with told() as texts:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clamp(-0.1, 0.1)  # type: ignore[union-attr]
            optimizer.step()
    assert compression and compression.stats()["steps"] == 6
    compression.close()
    return [*(text for text in texts if "synchronize()" in text), digest(weights(model))]


check("replaced", lambda: [replaced(attach) for attach in (False, True)])


def broadcast_first() -> list[str]:
    """Horovod makes a step of zeros to build the state of one optimizer, before both are attached."""
    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.marsit(named, timeout=20.0)
    halves = [
        hvd.DistributedOptimizer(torch.optim.AdamW([p for _, p in part], 0.01), part, compression=compression)
        for part in (named[:2], named[2:])
    ]
    for half in halves:
        hvd.broadcast_optimizer_state(half, root_rank=0)
    compression.attach(*halves)
    for step in range(2):
        for half in halves:
            half.zero_grad()
        loss_of(model, step).backward()
        for half in halves:
            half.step()
    assert compression.stats()["steps"] == 2
    compression.close()
    return gathered(digest(weights(model)))


check("broadcast first", broadcast_first)
check("more parameters", with_more_than_the_optimizer_has)


def proportional(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether gradients have changed by nothing but the factor that is taken out before a step."""
    was, now = (torch.cat([grad.flatten() for grad in grads]).double() for grads in (before, after))
    factor = float(now.norm() / was.norm())
    return bool(torch.allclose(now, was * factor, rtol=1e-6, atol=1e-9))


def repeated(method: str, attach: bool) -> dict[str, Any]:
    """step() after synchronize() without skip_synchronize(): nothing is reduced a second time."""
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, **options_of(method))
    wrong = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        state = compression.state_dict()
        kept = [value.clone() for value in state["state"].get("residual", {}).values()]
        optimizer.step()
        after = compression.state_dict()
        wrong.append(not proportional(before, [parameter.grad for parameter in model.parameters()]))
        wrong.append(digest(kept) != digest(after["state"].get("residual", {}).values()))
        wrong.append(not step + 1 == state["step"] == after["step"])
    compression.close()
    return {"wrong": sum(wrong), "weights": digest(weights(model)), "ranks": gathered(digest(weights(model)))}


@cache
def usual(method: str) -> str:
    return digest(playing()(method, True))


for name in ("none", "marsit"):
    check(f"repeated {name}", lambda: [repeated(name, False), repeated(name, True), usual(name)])


def zeroed(how: str) -> str:
    model = net()
    optimizer, compression = optimizer_for(model, "marsit", how != "stock none", **MARSIT)
    for step in range(4):
        model.zero_grad(set_to_none=how.endswith("none"))
        loss_of(model, step).backward()
        optimizer.step()
    compression.close()
    return digest(weights(model))


check("zero_grad", lambda: [zeroed("none"), zeroed("stock none"), zeroed("keep"), usual("marsit")])


def with_frozen() -> nn.Module:
    model = net()
    model[3].weight.requires_grad_(False)
    return model


check("frozen", lambda: compare(playing(with_frozen)))


def two_optimizers(method: str | None, attach: bool) -> list[Tensor]:
    models = [net(), net(seed=5)]
    made = [
        optimizer_for(model, method, attach, f"net{i}.", **options_of(method), **({"seed": i} if method else {}))
        for i, model in enumerate(models)
    ]
    for step in range(4):
        for model, (optimizer, _) in zip(models, made, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        for _, (optimizer, _) in zip(models, made, strict=True):
            optimizer.step()
    for _, compression in made:
        if compression:
            compression.close()
    return weights(models[0]) + weights(models[1])


check("two optimizers", lambda: compare(two_optimizers))


check("sparse", lambda: compare(playing(lambda: Words(True), word_loss)))
check("sparse_as_dense", lambda: compare(playing(lambda: Words(True), word_loss, sparse_as_dense=True)))


def as_if_dense(stock: str, attached: str) -> dict[str, float]:
    """Return how far a sparse embedding with ``sparse_as_dense`` ends from a dense one; and a sparse one without it."""
    found = {}
    for method, attach in ((stock, False), (attached, True)):
        dense = playing(lambda: Words(False), word_loss)(method, attach)
        for given in (True, False):
            ours = playing(lambda: Words(True), word_loss, sparse_as_dense=given)(method, attach)
            found[f"{method} {given}"] = farthest(dense, ours)
    return found


check("as if dense", lambda: as_if_dense("none", "ef_signsgd"))
check("as if dense, to and fro", lambda: as_if_dense("ef_signsgd", "none"))


def used_wrongly(make: Callable[[], nn.Module], loss: Any, attach: bool, **options: Any) -> str:
    model = make()
    made: list[Any] = []

    def attempt() -> None:
        made.extend(optimizer_for(model, "none", False, timeout=20.0, **options))
        if attach:
            made[1].attach(made[0])
        train(model, made[0], range(1), loss)

    text = refusal(attempt)
    close_together(made[1])
    return text


def close_together(compression: Any) -> None:
    """Close when no rank is still connecting: close() cuts the connections."""
    hvd.barrier()
    compression.close()


check("adasum", lambda: used_wrongly(net, loss_of, False, op=hvd.Adasum))
check("adasum attach", lambda: used_wrongly(net, loss_of, True, op=hvd.Adasum))


def uncalled(compression: Any) -> str:
    model = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    return refusal(lambda: train(model, optimizer, range(1)))


def no_parameters(given: object) -> str:
    """What one rank gives is no list of parameters; every rank is to learn it at once."""
    import horovod_compress.torch as hvc

    return refusal(lambda: hvc.Compression.none(given if RANK == 1 else net().named_parameters(), timeout=20.0))


def functions_and_classes() -> list[str]:
    import horovod_compress.torch as hvc

    return [uncalled(hvc.Compression.marsit), uncalled(hvc.Compression), uncalled(hvc.method("topk"))]


check("uncalled", functions_and_classes)
check("no parameters", lambda: [no_parameters(None), no_parameters([(0, nn.Parameter(torch.ones(2)))])])


def foreign_attach() -> str:
    model = net()
    _, compression = optimizer_for(model, "none")
    other = hvd.DistributedOptimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    text = refusal(lambda: compression.attach(other))
    close_together(compression)
    return text


check("foreign attach", foreign_attach)


def attached_again() -> list[Any]:
    """A rejected option, then a good one; returns how many hooks the optimizer has after each."""
    model = net()
    optimizer, compression = optimizer_for(model, "none", False)
    text = refusal(lambda: compression.attach(optimizer, second_moment="sharde"))
    hooks, loads = [len(optimizer._optimizer_step_pre_hooks)], optimizer.load_state_dict
    compression.attach(optimizer)
    hooks.append(len(optimizer._optimizer_step_pre_hooks))
    train(model, optimizer, range(1))
    close_together(compression)
    return [text, hooks, optimizer.load_state_dict is loads]


check("attach again", attached_again)


def forgotten(attach: bool) -> str:
    """A parameter that the optimizer has and the compression does not."""
    import horovod_compress.torch as hvc

    model = net()
    compression = hvc.Compression.none(list(model.named_parameters())[1:])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    if attach:
        compression.attach(optimizer)
    text = refusal(lambda: train(model, optimizer, range(1)))
    close_together(compression)
    return text


check("forgotten", lambda: [forgotten(False), forgotten(True)])


def made_twice() -> str:
    """Two optimizers for one model and compression, as when a cell of a notebook runs twice."""
    model = net()
    first, compression = optimizer_for(model, "none", False)
    second = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    assert first is not second
    with told() as texts:
        text = refusal(lambda: train(model, second, range(1)))
    assert not [warning for warning in texts if "attach(" in warning]  # which would not help
    close_together(compression)
    return text


check("made twice", made_twice)


def attached_on(ranks: list[int]) -> str:
    """Only some ranks call attach()."""
    model = net()
    optimizer, compression = optimizer_for(model, "none", RANK in ranks)
    text = refusal(lambda: train(model, optimizer, range(2)))
    close_together(compression)
    return text


check("attach on some", lambda: [attached_on([1]), attached_on([0, 2])])


def attached_late() -> list[str]:
    model = net()
    optimizer, compression = optimizer_for(model, "none", False)
    train(model, optimizer, range(2))
    text = refusal(lambda: compression.attach(optimizer))
    again = refusal(lambda: train(model, optimizer, range(2)))
    close_together(compression)
    return [text, again]


check("attach late", attached_late)


def in_step_of_the_docs() -> int:
    """The lines of docs/limits.md: every rank stops with the one that has the fewest batches."""
    text = (ROOT / "docs" / "limits.md").read_text()
    found = re.search(r"```python\n(def in_step.*?)```", text, re.DOTALL)
    assert found
    names: dict[str, Any] = {"torch": torch, "hvd": hvd}
    exec(found[1], names)
    return len(list(names["in_step"](range(2 + (RANK + 1) % SIZE))))


check("in step", in_step_of_the_docs)


class Warnings(logging.Handler):
    """Keeps what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("horovod_compress").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("horovod_compress").removeHandler(self)


def spoil(model: nn.Module) -> None:
    """Change one weight, on the last rank only."""
    if RANK == SIZE - 1:
        with torch.no_grad():
            model[3].bias[3] += 1e-3


def clip_apart(model: nn.Module) -> None:
    """Clip by a norm that is not the same on every rank."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + RANK))


def nothing_done(model: nn.Module) -> None:
    pass


def weights_apart(
    attach: bool,
    before: Callable[[nn.Module], None] = nothing_done,
    within: Callable[[nn.Module], None] = nothing_done,
    between: Callable[[nn.Module], None] = nothing_done,
    **options: Any,
) -> list[str]:
    """Train 6 steps, and do things to the model before, in the third step and after it; return the warnings."""
    model = net()
    before(model)
    with Warnings() as warnings:
        optimizer, compression = optimizer_for(model, "marsit", attach, verify_every=2, warmup_steps=1, **options)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            if step == 2:
                within(model)
            with optimizer.skip_synchronize():
                optimizer.step()
            if step == 1:  # the weights of step 3 are looked at after the optimizer's step in step 2
                between(model)
        close_together(compression)
    return warnings.texts


def updates_apart(between: Callable[[nn.Module], None]) -> list[str]:
    """In update mode ranks differ between exchanges, here in every second step, and should not behind them."""
    import horovod_compress.torch as hvc

    model = net()
    with Warnings() as warnings:
        compression = hvc.Compression.none(model.named_parameters(), verify_every=2, timeout=20.0)
        optimizer = hvc.DistributedUpdateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression, communication_delay=2
        )
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if step == 3:
                between(model)
        assert compression._session.reducer.verification.weights.compared == 3
        close_together(compression)
    return warnings.texts


def in_half_of_the_ranks(attach: bool) -> list[str]:
    """Weights that differ from those outside the process set, where they may, or within it."""
    members = [0, SIZE - 1]
    chosen = hvd.add_process_set(members)
    found = weights_apart(attach, lambda model: model[0].bias.data.add_(RANK not in members), process_set=chosen)
    found += weights_apart(attach, spoil, process_set=chosen)
    hvd.remove_process_set(chosen)
    return found


check("weights alike", lambda: [weights_apart(False), weights_apart(True), updates_apart(nothing_done)])
check("weights at first", lambda: [weights_apart(False, spoil), weights_apart(True, spoil)])
check("weights clipped", lambda: [weights_apart(True, within=clip_apart)])
check("weights loaded on one rank", lambda: [weights_apart(True, between=spoil), updates_apart(spoil)])
check("weights of a process set", lambda: in_half_of_the_ranks(True))


def flipped(on_rank: int | None, attach: bool) -> str:
    """One bit of one result on one rank is wrong in step 2."""
    decode = FullPrecision.decode
    model = net()
    options = dict(full_precision_every=1, schedule="layerwise", verify_every=1)
    optimizer, compression = optimizer_for(model, "marsit", attach, **options)

    def decode_wrongly(self: Any, work: Any, parts: Any, key: Any, result_scale: float) -> None:
        decode(self, work, parts, key, result_scale)
        if key.step == 2 and key.bucket == 3 and on_rank == RANK:
            work.grads[0].view(-1).view(torch.int32)[17 % work.grads[0].numel()] ^= 1

    FullPrecision.decode = decode_wrongly
    try:
        train(model, optimizer, range(2))
        return refusal(lambda: train(model, optimizer, [2]))
    finally:
        FullPrecision.decode = decode
        compression.close()


check("flip", lambda: [flipped(1, attach=False), flipped(SIZE - 1, attach=True)])
check("flip, to and fro", lambda: [flipped(1, attach=True), flipped(SIZE - 1, attach=False)])
check("no flip", lambda: flipped(None, True))


def dropped(attach: bool) -> tuple[bool, list[str]]:
    """Return what is left of a compression that nobody closes, once its optimizer and its model are gone."""
    before = {*threading.enumerate()}
    model = net()
    optimizer, compression = optimizer_for(model, "marsit", attach)
    train(model, optimizer, range(2))
    assert compression
    reducer = compression._here().reducer
    begun = len(threading.enumerate()) > len(before)
    del model, optimizer, compression
    until = time.monotonic() + 10.0
    while (left := {*threading.enumerate()} - before) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    return begun and reducer.failure.closing, [thread.name for thread in left]


check("dropped", lambda: [dropped(attach) for attach in (False, True)])


def unused(given: bool) -> list[str]:
    """Return what is said in a training without a compression that was created for it."""
    model, told = net(), _Heard()
    logging.getLogger("horovod_compress").addHandler(told)
    compression = hvc.Compression.marsit(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression if given else hvd.Compression.none,
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(2))
    logging.getLogger("horovod_compress").removeHandler(told)
    compression.close()
    return [text for text in told.texts if "has compressed nothing" in text]


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


check("unused", lambda: unused(False))
check("not unused", lambda: unused(True))


def told_of_several(attach: bool) -> list[str]:
    """Return what is said of two optimizers that share a compression."""
    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.marsit(named, timeout=20.0, warmup_steps=0)
    found = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([parameter for _, parameter in mine], lr=0.1),
            named_parameters=mine,
            compression=compression,
        )
        for mine in (named[:2], named[2:])
    ]
    with told() as texts:
        if attach:
            compression.attach(*found)
        for step in range(3):
            model.zero_grad()
            loss_of(model, step).backward()
            for optimizer in found:
                optimizer.step()
    compression.close()
    return texts


check("several told", lambda: [told_of_several(attach) for attach in (False, True)])


def in_process_set() -> dict[str, Any]:
    members = [0, SIZE - 1]
    chosen = hvd.add_process_set(members)
    found = {}
    for path in PATHS:
        model = net()
        optimizer, compression = optimizer_for(model, path[0], path[1], process_set=chosen, **options_of(path[0]))
        train(model, optimizer, range(4))
        if compression:
            if RANK in members:
                assert compression.stats()["steps"] == 4
            compression.close()
        found[str(path)] = digest(weights(model))
    every = gathered(found)
    hvd.remove_process_set(chosen)
    return {"members": members, "digests": every}


check("process set", in_process_set)


def failed(attach: bool) -> list[str]:
    """Return the errors of steps, the second of which fails: a program may catch them."""
    model = net()
    optimizer, compression = optimizer_for(model, "marsit", attach)
    train(model, optimizer, range(1))
    found = []
    for step in range(1, 5):
        if step == 1 and RANK == 1:
            failure = compression._here().reducer.failure
            failure.report("a test", RuntimeError("over"))
            while not failure.failed():
                time.sleep(0.01)
        found.append(refusal(lambda step=step: train(model, optimizer, range(step, step + 1))))
    return found


for attach in (True, False):  # last: without attach(), Horovod may end with it
    check(f"failed {attach}", lambda: failed(attach))
