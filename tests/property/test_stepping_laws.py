"""Adam's step by our kernel, beside torch's: the same weights and states, and torch can take over at any time."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_compress import ops
from horovod_compress.engine.optimizer.adam import AdamStepping
from horovod_compress.engine.optimizer.second_moment import BOUND
from horovod_compress.errors import ConfigError, StateError
from horovod_compress.fronts.steps import _check_unused
from tests.golden.play import TENSORS, grads
from tests.golden.trained import HELD, Checkpoint, Ranks, adamw
from tests.support.nets import digest

LR = 0.01


def ranks(step: str, make: Callable[..., Any] = adamw, method: str = "marsit", **meet: Any) -> Ranks:
    return Ranks(TENSORS, method, make, HELD | {"step": step} | meet, world=2)


def kind(cls: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: cls(list(parameters), **{"lr": LR} | options)


def given(step: int) -> list[dict[str, Tensor]]:
    return [{name: grad * 0.05 for name, grad in mine.items()} for mine in grads(step, TENSORS, 2)]


def moved(team: Ranks) -> int:
    """Return how many parameters of rank 0 were moved by the kernel since torch had its turn."""
    held = team.steps[0].held
    return len(held.stepping._owed) if held and held.stepping else 0


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "weight_decay": 0.3, "lr": 0.003}, {"params": others}], lr=LR)


OPTIMIZERS = {
    "AdamW": adamw,
    "AdamW of torch's defaults": kind(torch.optim.AdamW),
    "fused": kind(torch.optim.AdamW, fused=True),
    "foreach": kind(torch.optim.AdamW, foreach=True),
    "Adam": kind(torch.optim.Adam),
    "coupled decay": kind(torch.optim.Adam, weight_decay=0.1),
    "climbs": kind(torch.optim.AdamW, maximize=True),
    "coupled, climbs": kind(torch.optim.Adam, maximize=True, weight_decay=0.1, fused=True),
    "tensor of rates": kind(torch.optim.AdamW, lr=torch.tensor(LR)),
    "groups": in_groups,
}


def run_both(make: Callable[..., Any], steps: int) -> int:
    """Compare each step with torch's from the same state; return how many were moved by the kernel."""
    count = 0
    with ranks("auto", make) as ours, ranks("torch", make) as theirs:
        for number in range(steps):
            values = given(number)
            before = [p.detach().clone() for p in ours.models[0].values()]
            for team in (ours, theirs):
                team.step(copy.deepcopy(values))
            count += moved(ours)
            for at, (p, q) in enumerate(zip(ours.models[0].values(), theirs.models[0].values(), strict=True)):
                spacing = torch.finfo(p.dtype).eps * torch.maximum(p.detach().abs(), before[at].abs())
                assert bool(((p - q).abs() <= spacing + 4e-7 * LR * 10).all()), (number, at)
                mine, its = ours.optimizers[0].state[p], theirs.optimizers[0].state[q]
                assert torch.allclose(mine["exp_avg"], its["exp_avg"], rtol=1e-6, atol=1e-6)
                assert torch.equal(mine["step"], its["step"])
            for each in zip(ours.optimizers, theirs.optimizers, strict=True):
                copy_into(*each)
    return count


def copy_into(mine: Any, its: Any) -> None:
    """Give an optimizer's parameters and first moments the bits of another's."""
    for group, other in zip(mine.param_groups, its.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            with torch.no_grad():
                p.copy_(q)
                mine.state[p]["exp_avg"].copy_(its.state[q]["exp_avg"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_torch_s_within_a_rounding(name: str) -> None:
    assert run_both(OPTIMIZERS[name], 7) == 4 * len(TENSORS)  # nothing is held in the first steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW of torch's defaults", "coupled decay"])
def test_200_steps_are_torch_s_within_a_rounding_each(name: str) -> None:
    assert run_both(OPTIMIZERS[name], 200) == 197 * len(TENSORS)


def test_gradients_are_what_they_were_and_hooks_see_them() -> None:
    seen: list[list[Tensor | None]] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(lambda o, *_: seen.append([p.grad for p in o.param_groups[0]["params"]]))
        return optimizer

    with ranks("auto", make) as team:
        team.optimizers[0].register_step_pre_hook(
            lambda o, *_: seen.append([p.grad for p in o.param_groups[0]["params"]])
        )
        for number in range(5):
            seen.clear()
            results = team.step(given(number))
            before, after, *_ = seen
            assert len(seen) == 3  # of rank 0 both, of rank 1 one
            for grad, again, result, p in zip(before, after, results[0].values(), team.models[0].values(), strict=True):
                assert grad is again is p.grad and grad is not None
                assert torch.equal(grad, result) or number < 2
        assert moved(team)


def test_versions_count_so_that_autograd_notices_changed_weights() -> None:
    with ranks("auto") as team:
        for number in range(4):
            parameters = list(team.models[0].values())
            versions = [p._version for p in parameters]
            team.step(given(number))
            assert all(p._version > version for p, version in zip(parameters, versions, strict=True))
        assert moved(team)


# ---- torch takes over --------------------------------------------------------------------------


def taken_over(team: Ranks, how: str) -> torch.optim.Optimizer:
    """Return an optimizer that is torch's alone, behind eight steps of the kernel."""
    for number in range(8):
        team.step(given(number))
    assert moved(team) == len(TENSORS)
    optimizer = team.optimizers[0]
    if how == "state_dict":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        alone = adamw([nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
        alone.load_state_dict(torch.load(file))
        return alone
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    if how == "close":
        team.steps[0].leave()
    return optimizer


def test_torch_goes_on_where_the_kernel_stopped() -> None:
    """From its state, from a copy, behind close(), or by a step for which nothing was exchanged: the bits are equal."""
    ends = []
    for how in ("state_dict", "deepcopy", "close", "torch's turn"):
        with ranks("auto") as team:
            alone = taken_over(team, how)
            assert moved(team) == (len(TENSORS) if how == "torch's turn" else 0)
            parameters = alone.param_groups[0]["params"]
            for number in range(8, 11):
                for p, grad in zip(parameters, given(number)[0].values(), strict=True):
                    p.grad = grad.clone()
                alone.step()
                assert not moved(team)
            ends.append([p.detach().clone() for p in parameters])
    for end in ends[1:]:
        assert all(torch.equal(p, q) for p, q in zip(end, ends[0], strict=True))


def test_what_torch_goes_on_with_is_what_it_would_have_left_but_for_the_last_gradient() -> None:
    found = []
    for step in ("auto", "torch"):
        with ranks(step) as team:
            for number in range(8):
                team.step(given(number))
            optimizer, held = team.optimizers[0], team.steps[0].held
            states = list(optimizer.state_dict()["state"].values())
            assert held
            found.append([state["exp_avg_sq"].clone() for state in states])
            least = [(s["exp_avg"] / (1 - 0.75**8) / BOUND).square() for s in states]
            squares = [h.squares() for h in held._held.values()]
    equal = total = 0
    for mine, its, bound, square in zip(*found, least, squares, strict=True):
        assert torch.allclose(mine, (1 - 0.875**8) * torch.maximum(square, bound), rtol=1e-3)
        assert bool((mine <= its * 1.001).all())
        equal += int(torch.isclose(mine, its, rtol=1e-3).sum())
        total += mine.numel()
    assert equal > total / 3


def test_a_state_of_torch_s_is_taken_in_the_middle() -> None:
    with ranks("auto") as team:
        for number in range(5):
            team.step(given(number))
        saved = Checkpoint.of(team)
        for number in range(5, 9):
            team.step(given(number))
        ends = [p.detach().clone() for p in team.models[0].values()]
    with ranks("auto") as again:
        saved.resume(again)
        for number in range(5, 9):
            again.step(given(number))
        assert moved(again)
        assert all(torch.equal(p, q) for p, q in zip(again.models[0].values(), ends, strict=True))


def test_a_loaded_state_is_not_written_over() -> None:
    with ranks("auto") as team:
        for number in range(5):
            team.step(given(number))
        optimizer = team.optimizers[0]
        state = copy.deepcopy(optimizer.state_dict())
        for kept in state["state"].values():
            kept["exp_avg_sq"].fill_(7.0)
        team.step(given(5))
        optimizer.load_state_dict(state)
        assert all(bool((kept["exp_avg_sq"] == 7.0).all()) for kept in optimizer.state_dict()["state"].values())


def test_a_step_that_raises_leaves_no_gradient_hidden() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        optimizer, model = team.optimizers[0], team.models[0]
        extra = nn.Parameter(torch.ones(3))
        extra.grad = torch.ones(3)
        optimizer.add_param_group({"params": [extra]})
        optimizer.state[extra] = {"step": torch.tensor(1.0), "exp_avg": "no tensor", "exp_avg_sq": torch.ones(3)}
        with pytest.raises((AttributeError, TypeError, RuntimeError)):
            team.step(given(4))
        assert any(p.grad is None for p in model.values())
        optimizer.state[extra]["exp_avg"] = torch.zeros(3)
        optimizer.state_dict()
        assert all(p.grad is not None for p in model.values())


def test_after_a_step_that_raised_the_next_one_is_whole() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        optimizer = team.optimizers[1]  # the last one that steps
        raising = optimizer.register_step_post_hook(lambda *_: 1 / 0)
        optimizer._optimizer_step_post_hooks.move_to_end(raising.id, last=False)  # before gradients are shown again
        with pytest.raises(ZeroDivisionError):
            team.step(given(4))
        raising.remove()
        team.step(given(5))
        assert len(team.steps[1].held.stepping._owed) == len(TENSORS)  # type: ignore[union-attr]
        assert {float(kept["step"]) for each in team.optimizers for kept in each.state.values()} == {6.0}


def test_an_error_while_a_step_is_prepared_moves_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks("auto") as team:
        for number in range(3):  # the next two rounds are coded
            team.step(given(number))
        calls, add = [], AdamStepping.add

        def fails(*given: Any, **options: Any) -> None:
            calls.append(1)
            if len(calls) == len(TENSORS) + 3:  # on the last rank
                raise MemoryError
            add(*given, **options)

        monkeypatch.setattr(AdamStepping, "add", fails)
        with pytest.raises(MemoryError):
            team.step(given(3))
        for steps in team.steps:
            steps.begin()
        results = team.fleet.step(given(4))
        for name, parameter in team.models[1].items():
            parameter.grad = results[1][name].clone()
        team.optimizers[1].step()
        assert {float(kept["step"]) for kept in team.optimizers[1].state.values()} == {4.0}


def test_a_state_that_somebody_has_reset_is_not_overwritten() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        for optimizer in team.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        for number in range(4, 8):
            team.step(given(number))
        for optimizer in team.optimizers:
            assert all(bool(value.isfinite().all()) for state in optimizer.state.values() for value in state.values())


def test_a_state_of_inference_mode_is_made_all_the_same() -> None:
    """As of a program whose steps run in it."""
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        optimizer = team.optimizers[0]
        with torch.inference_mode():
            for kept in optimizer.state.values():
                kept["exp_avg_sq"] = torch.zeros_like(kept["exp_avg_sq"])
        found = [kept["exp_avg_sq"] for kept in optimizer.state_dict()["state"].values()]
        assert all(bool(kept.any()) and kept.is_inference() for kept in found if kept.numel())


def test_an_eps_of_nothing_is_refused() -> None:
    """0 / 0, where a result is exactly 0."""
    with (
        pytest.raises(ConfigError, match="AdamW with eps=0 would divide 0 by 0"),
        ranks("auto", kind(torch.optim.AdamW, eps=0.0)),
    ):
        pass
    with ranks("auto", kind(torch.optim.AdamW, eps=0.0), second_moment="own"):
        pass  # as the message says


@pytest.mark.parametrize("left", [3, 4, 5])
def test_a_job_resumes_with_the_same_bits_behind_a_step_that_was_left_out(left: int) -> None:
    """The exchange behind it is for the same step, and of its kind: exact rounds lie elsewhere from there on."""
    few = {"warmup_steps": 2, "rebuild_every": 3}

    def go_on(team: Ranks, numbers: range) -> list[bool]:
        kinds = []
        for number in numbers:
            if number == left:
                for steps in team.steps:
                    steps.begin()
                team.fleet.step(given(number))
            else:
                team.step(given(number))
            kinds.append(bool(team.steps[0].held and team.steps[0].held.exact))
        return kinds

    with ranks("auto", **few) as team:
        go_on(team, range(left + 1))
        saved = Checkpoint.of(team)
        kinds = go_on(team, range(left + 1, 10))
        ends = [p.detach().clone() for p in team.models[0].values()]
    with ranks("auto", **few) as again:
        saved.resume(again)
        assert go_on(again, range(left + 1, 10)) == kinds
        assert all(torch.equal(p, q) for p, q in zip(again.models[0].values(), ends, strict=True))


LEFT = {"count": 2, "all_exact": False, "last_exact": True}


@pytest.mark.parametrize(
    "broken", [{"x": [2, 0, 1]}, {"x": LEFT | {"count": 0}}, {"x": LEFT | {"last_exact": 1}}, [LEFT], 5]
)
def test_broken_counts_of_unused_exchanges_are_refused(broken: object) -> None:
    _check_unused({"x": LEFT})
    with pytest.raises(StateError, match="a count and two flags"):
        _check_unused(broken)


def test_a_kernel_that_raises_leaves_what_was_owed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is that of a training without the step that has failed."""

    def no_memory(*given: Any, **options: Any) -> None:
        raise MemoryError

    found = []
    for fails in (False, True):
        with ranks("auto") as team, monkeypatch.context() as patched:
            for number in range(4):
                team.step(given(number))
            if fails:
                patched.setattr(ops, "adam_step_all", no_memory)
                with pytest.raises(MemoryError):
                    team.step([{name: grad / 16 for name, grad in mine.items()} for mine in given(4)])  # no surge
            states = team.optimizers[0].state_dict()["state"].values()
            found.append([state["exp_avg_sq"].clone() for state in states])
    assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True))


def test_a_later_compression_takes_over_from_one_that_was_not_closed() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        assert team.steps[0].held is not None
        optimizer, earlier = team.optimizers[0], team.steps[0].held.stepping
        assert earlier is not None and earlier._owed
        later = AdamStepping(optimizer, earlier._places)
        assert not earlier._owed
        earlier.end()
        assert optimizer.__getstate__ == later._pickled


def test_a_fork_that_saves_the_optimizer_changes_nothing_else() -> None:
    """As a worker of a data loader may: it gets the whole state, has as many threads, and its parent's state stays."""
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        optimizer, held, before = team.optimizers[0], team.steps[0].held, torch.get_num_threads()
        assert held is not None and held.stepping is not None
        owed, (read, write) = len(held.stepping._owed), os.pipe()
        torch.set_num_threads(3)
        try:
            if not (child := os.fork()):
                try:
                    found = digest(state["exp_avg_sq"] for state in optimizer.state_dict()["state"].values())
                    os.write(write, f"{found} {torch.get_num_threads()}".encode())
                finally:
                    os._exit(0)
            os.close(write)
            assert os.waitpid(child, 0)[1] == 0
        finally:
            torch.set_num_threads(before)
        found, threads = os.read(read, 100).decode().split()
        os.close(read)
        assert threads == "3" and owed and len(held.stepping._owed) == owed
        assert found == digest(state["exp_avg_sq"] for state in optimizer.state_dict()["state"].values())


# ---- what is torch's ---------------------------------------------------------------------------


class Mine(torch.optim.AdamW):
    """A class of somebody's own."""


@pytest.mark.parametrize("cls", [Mine, torch.optim.NAdam])
def test_other_optimizers_are_left_to_torch(cls: Any) -> None:
    with ranks("auto", kind(cls)) as team:
        assert team.steps[0].held is not None and team.steps[0].held.stepping is None


def test_flags_leave_it_to_torch() -> None:
    with ranks("auto") as team:
        for number in range(5):
            for optimizer in team.optimizers:
                optimizer.param_groups[0]["capturable"] = number == 4  # which torch refuses on CPUs without compiling
            if number < 4:
                team.step(given(number))
        assert moved(team)
        held = team.steps[0].held
        assert held is not None and held.stepping is not None and not held.stepping.chosen(held._held)
        assert not moved(team)


def lay(tensor: Tensor, how: str) -> None:
    """Let the elements of a tensor lie in another way."""
    if how == "channels last":
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    elif how == "part":
        wider = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
        tensor.data = wider[..., :-1].copy_(tensor.data)
    else:
        tensor.data = tensor.data.mT.contiguous().mT


LAYOUTS = ("channels last", "part", "transposed")


@pytest.mark.parametrize("how", LAYOUTS)
def test_how_tensors_of_one_rank_lie_changes_no_bit(how: str) -> None:
    """Of weights, of state, or of both: a formula with other roundings would set ranks apart."""
    ends = []
    for changed in ((), ("kernel",), ("exp_avg",), ("kernel", "exp_avg")):
        with ranks("auto") as team:
            for number in range(6):
                p = team.models[1]["kernel"]
                if number == 3 and "kernel" in changed:
                    lay(p, how)
                if number == 3 and "exp_avg" in changed:
                    lay(team.optimizers[1].state[p]["exp_avg"], how)
                team.step(given(number))  # looks whether ranks have the same weights
            assert moved(team) == len(team.steps[1].held.stepping._owed) == len(TENSORS)  # type: ignore[union-attr]
            assert p.is_contiguous() == ("kernel" not in changed)
            ends.append([p.detach().clone() for p in team.models[1].values()])
    for end in ends[1:]:
        assert all(torch.equal(p, q) for p, q in zip(end, ends[0], strict=True))


def test_weights_that_share_memory_are_torch_s() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        model = team.models[0]
        with torch.no_grad():
            model["row"].data = model["wide"].data.view(-1)[:64]
        held = team.steps[0].held
        assert held is not None and held.stepping is not None
        assert held.stepping.chosen(held._held) == frozenset()
        assert not moved(team)  # torch has what it needs


def test_a_scaler_that_leaves_its_scale_to_a_fused_step_is_torch_s() -> None:
    with ranks("auto", kind(torch.optim.AdamW, fused=True)) as team:
        for number in range(4):
            team.step(given(number))
        for optimizer in team.optimizers:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        team.step(given(4))
        assert not moved(team)
        for optimizer in team.optimizers:
            del optimizer.grad_scale, optimizer.found_inf
        team.step(given(5))
        assert moved(team) == len(TENSORS)


def test_a_closure_may_make_the_gradients() -> None:
    with ranks("auto") as team:
        for number in range(4):
            team.step(given(number))
        for steps in team.steps:
            steps.begin()
        results = team.fleet.step(given(4))
        assert all(reducer.wait_idle(5.0) for reducer in team.fleet.reducers)

        def closure() -> float:
            for name, p in team.models[0].items():
                p.grad = results[0][name].clone()
            return 1.0

        assert team.optimizers[0].step(closure) == 1.0
        assert moved(team) == len(TENSORS)
        assert all(p.grad is not None for p in team.models[0].values())


def test_what_the_option_may_be() -> None:
    with pytest.raises(ConfigError, match="got 'ours'"):
        ranks("ours")
