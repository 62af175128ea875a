"""What can be seen of a module that is not wrapped with one rank, in this process."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import horovod_compress.ddp as hvc
from horovod_compress.engine.optimizer.local_steps import Schedule
from horovod_compress.errors import ConfigError, MismatchError
from horovod_compress.fronts import fresh
from horovod_compress.fronts.compression import BaseCompression
from tests.support.nets import OfOne

LONG = 30.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, which met by a file: nothing in the environment tells of it."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Three layers, of which a pass may leave out the last one or run the first one in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, given: Tensor, reentrant: bool | None = None, *, whole: bool = True) -> Tensor:
        if reentrant is None:
            found = self.second(self.first(given))
        else:
            given = given.requires_grad_()
            found = checkpoint(lambda given: self.second(self.first(given)), given, use_reentrant=reentrant)
        return self.last(found) if whole else found  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def compression(net: Net) -> Iterator[hvc.Compression]:
    """A compression of the net; one rank's results of `none` are its gradients."""
    made = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    yield made
    made.close()


def loss(net: nn.Module, *given: Any, **how: Any) -> Tensor:
    return net(torch.ones(3, 4), *given, **how).square().sum()  # type: ignore[no-any-return]


def grads(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def expected(make: Callable[[Net], object]) -> list[Tensor]:
    """Return the gradients of torch alone."""
    net = Net()
    make(net)
    return grads(net)


def equal(mine: list[Tensor], others: list[Tensor]) -> bool:
    return len(mine) == len(others) and all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def passed(net: nn.Module, *given: Any, **how: Any) -> BaseException | None:
    """Run a backward pass, which has to end; return its error."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            loss(net, *given, **how).backward()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    assert found, "the backward pass hangs"
    return found[0]


# ---- passes of all kinds ----


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_are_there_when_the_pass_is_over(
    net: Net, compression: hvc.Compression, reentrant: bool | None
) -> None:
    assert compression.register(net) is net
    for step in range(3):
        net.zero_grad(set_to_none=step == 1)
        loss(net, reentrant).backward()
        assert equal(grads(net), expected(lambda other: loss(other, reentrant).backward()))
        assert compression.stats()["steps"] == step + 1


def test_passes_without_sync_add_up(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    with compression.no_sync():
        loss(net).backward()
        with compression.no_sync():
            loss(net, whole=False).backward()
        loss(net).backward()
    assert compression.stats()["steps"] == 0
    loss(net).backward()
    assert compression.stats()["steps"] == 1

    def alone(other: Net) -> None:
        for whole in (True, False, True, True):
            loss(other, whole=whole).backward()

    assert equal(grads(net), expected(alone))


def test_several_passes_through_one_graph_are_several_steps(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    found = loss(net)
    found.backward(retain_graph=True)
    found.backward()
    assert compression.stats()["steps"] == 2

    def alone(other: Net) -> None:
        found = loss(other)
        found.backward(retain_graph=True)
        found.backward()

    assert equal(grads(net), expected(alone))


def test_a_parameter_without_gradient_gets_that_of_the_other_ranks(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    loss(net, whole=False).backward()
    assert net.last.weight.grad is not None and not net.last.weight.grad.any()
    assert equal(grads(net)[:4], expected(lambda other: loss(other, whole=False).backward()))
    loss(net).backward(inputs=[net.last.weight])
    assert net.last.weight.grad.any() and compression.stats()["steps"] == 2


def test_gradients_that_are_only_computed_are_left_alone(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    torch.autograd.grad(loss(net), list(net.parameters()))
    assert compression.stats()["steps"] == 0 and not grads(net)


def test_tied_weights_are_one(compression: hvc.Compression) -> None:
    net, alone = Net(), Net()
    for model in (net, alone):
        model.second.weight = model.first.weight
    tied = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    tied.register(net)
    loss(net).backward()
    loss(alone).backward()
    assert equal(grads(net), grads(alone)) and len(grads(net)) == 5
    tied.close()


def test_frozen_parameters_are_left_alone_and_may_be_trained_later(net: Net, compression: hvc.Compression) -> None:
    net.first.requires_grad_(False)  # after it was planned
    compression.register(net)
    assert not net.first.weight.requires_grad
    loss(net).backward()
    assert net.first.weight.grad is None and len(grads(net)) == 4
    net.zero_grad()
    net.first.requires_grad_(True)
    loss(net).backward()
    assert equal(grads(net), expected(lambda other: loss(other).backward()))


def test_parameters_may_be_frozen_between_the_passes(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    found = loss(net)
    net.first.requires_grad_(False)
    found.backward()
    assert equal(grads(net), expected(lambda other: loss(other).backward())[2:])


# ---- passes that go wrong ----


def interrupt(net: Net, parameter: Tensor) -> Any:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("no luck")

    return parameter.register_hook(fail)


def test_after_an_error_in_the_middle_nothing_goes_on(net: Net, compression: hvc.Compression) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression.register(net, optimizer)
    assert passed(net) is None
    optimizer.step()
    handle = interrupt(net, net.first.weight)
    assert str(passed(net)) == "no luck"
    handle.remove()
    for error in (passed(net), passed(net)):
        assert isinstance(error, hvc.ExchangeError), error
        assert "an error has ended a backward pass in the middle, after 5 of 6 gradients were handed over" in str(error)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_so_does_the_step_of_the_optimizer(
    net: Net, compression: hvc.Compression, reentrant: bool, given: bool
) -> None:
    """Also of one that the compression was not given; the control has parameters of another model."""
    optimizer, other = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(Net().parameters(), lr=0.1)
    compression.register(net, optimizer if given else None)
    interrupt(net, net.first.weight)
    assert str(passed(net, reentrant)) == "no luck"
    other.step()
    with pytest.raises(hvc.ExchangeError, match="an error has ended a backward pass in the middle, after 5 of 6"):
        optimizer.step()


def test_nothing_is_saved_or_loaded_in_the_middle_of_a_step(
    net: Net, compression: hvc.Compression, tmp_path: Path
) -> None:
    def interrupt(*given: object) -> None:
        with pytest.raises(ConfigError, match=r"a step is under way.* may set a flag"):
            compression.save(tmp_path)
        with pytest.raises(ConfigError, match="a step is under way"):
            compression.load_state_dict(before)
        interrupted.append(net.last.bias[0].item())

    class Interrupted(torch.optim.Optimizer):
        """A signal comes when the weights have moved."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            with torch.no_grad():
                net.last.bias.fill_(1.0)
            interrupt()

    interrupted: list[float] = []
    optimizer = Interrupted(net.parameters(), {})
    compression.register(net, optimizer)
    before = compression.state_dict()
    loss(net).backward()
    optimizer.register_step_post_hook(interrupt)
    optimizer.step()
    assert interrupted == [1, 1]
    compression.save(tmp_path)


@pytest.mark.parametrize("call", ["step", "flush"])
def test_nor_in_what_update_mode_does_beside_the_optimizer_s_own_step(
    net: Net, compression: hvc.Compression, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come while updates are exchanged: its handler must not fetch their results either."""
    made = hvc.DistributedUpdateOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression
    )
    settled, ended = list[str](), list[str]()

    def interrupted(*given: Any, **options: Any) -> None:
        with pytest.raises(ConfigError, match="a step is under way"):
            compression.state_dict()
        ended.append(call)

    monkeypatch.setattr(Schedule, "settle", lambda schedule: settled.append(call))
    monkeypatch.setattr(Schedule, call, interrupted)
    getattr(made, call)()
    assert ended == [call] and not settled
    compression.state_dict()
    assert settled == [call], "the control"


def test_building_the_state_of_an_optimizer_is_no_step(net: Net, compression: hvc.Compression) -> None:
    """As torch does it before it saves; the control is a step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    compression.register(net, optimizer)
    interrupt(net, net.first.weight)
    assert str(passed(net)) == "no luck"
    optimizer.zero_grad()
    get_state_dict(net, optimizer)
    with pytest.raises(hvc.ExchangeError, match="in the middle"):
        optimizer.step()


def test_an_error_before_the_first_gradient_leaves_no_trace(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    handle = interrupt(net, net.last.weight)
    net.last.bias.requires_grad_(False)
    assert str(passed(net)) == "no luck"
    handle.remove()
    assert passed(net) is None and compression.stats()["steps"] == 1


def test_a_step_that_is_not_finite_is_refused_and_the_next_one_is_not(net: Net) -> None:
    compression = hvc.Compression.topk(net.named_parameters(), nonfinite="raise", timeout=LONG)
    compression.register(net)
    with pytest.raises(hvc.NonFiniteError, match="gradient values of bucket 0 are not finite in step 0"):
        (loss(net) * float("inf")).backward()
    net.zero_grad()
    assert passed(net) is None
    other = Net()
    second = hvc.Compression.topk(other.named_parameters(), timeout=LONG)
    second.register(other)
    with pytest.raises(hvc.NonFiniteError):  # the other model ends the pass with it
        (loss(net) * float("inf") + loss(other)).backward()
    assert passed(other) is None and second.stats()["steps"] == 2
    second.close()
    compression.close()


def test_numbers_of_numpy_are_those_of_python_in_calls_too(net: Net, tmp_path: Path) -> None:
    compression = hvc.Compression.topk(net.named_parameters())
    compression.register(net, torch.optim.SGD(net.parameters(), lr=0.1), match_norm=np.bool_(False))
    compression.publish(prometheus=tmp_path / "train.prom", every=np.int64(1))
    with hvc.trace(tmp_path / "trace.json", steps=np.int64(1)):
        net(torch.ones(2, 4)).sum().backward()
    compression.close()


def test_what_reentrant_checkpoints_bring_twice_is_refused(net: Net, compression: hvc.Compression) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression.register(net, optimizer)
    given = torch.ones(3, 4, requires_grad=True)
    middle = checkpoint(net.first, given, use_reentrant=True)
    net.last(net.second(checkpoint(net.first, middle, use_reentrant=True))).sum().backward()
    with pytest.raises(hvc.ConfigError, match=r"4 parameter\(s\) have got no gradient, .*, or others have got two"):
        optimizer.step()
    with pytest.raises(
        hvc.ConfigError, match=r"the gradient of first.* has come twice in one backward pass.*reentrant"
    ):
        raise passed(net) or AssertionError


def test_a_pass_that_ends_in_a_reentrant_checkpoint_has_to_bring_all(net: Net, compression: hvc.Compression) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression.register(net, optimizer)
    loss(net, True, whole=False).backward()
    text = r"has ended in a reentrant checkpoint, where 2 parameter\(s\) have got no gradient, last"
    with pytest.raises(hvc.ConfigError, match=text):
        optimizer.step()


def test_closing_refuses_later_passes(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    compression.close()
    assert "this compression was closed" in str(passed(net))


@pytest.mark.parametrize("begin", ["register", "attach"])
def test_what_is_closed_takes_no_model_or_optimizer(net: Net, compression: hvc.Compression, begin: str) -> None:
    compression.close()
    with pytest.raises(hvc.ConfigError, match=r"this compression was closed by close\(\)"):
        hvc.DistributedUpdateOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression)
    with pytest.raises(hvc.ConfigError, match=r"this compression was closed by close\(\)"):
        getattr(compression, begin)(net if begin == "register" else torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("hooks", [True, False])
def test_gradients_that_no_hook_has_seen_are_told_of(
    net: Net, compression: hvc.Compression, hooks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of torch.autograd.grad() are this rank's alone; the control is backward()."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression.register(net, optimizer)
    optimizer.step()
    assert not caplog.records
    for _ in range(2):
        if hooks:
            loss(net).backward()
        else:
            grads = torch.autograd.grad(loss(net), list(net.parameters()))
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter.grad = grad
        optimizer.step()
    compression.close()
    told = [text for text in caplog.messages if "none has compressed nothing" in text]
    assert len(told) == (not hooks) and all("torch.autograd.grad() calls no hooks" in text for text in told)


# ---- one module, one compression ----


def test_a_module_can_have_another_compression_after_the_first_one(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    other = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    with pytest.raises(hvc.ConfigError, match="has a compression already"):
        other.register(net)
    with pytest.raises(hvc.ConfigError, match="this compression has a module already"):
        compression.register(net)
    compression.close()
    other.register(net)
    assert passed(net) is None and other.stats()["steps"] == 1
    other.close()


def _fsdp(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    made = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it needs an accelerator
    nn.Module.__init__(made)
    return made


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda net: net.named_parameters(), "register\\(\\) takes a module, or Distributed.*, got <generator"),
        (nn.DataParallel, "this module has the class DataParallel, whose parameters or gradients"),
        (
            lambda net: nn.Sequential(DistributedDataParallel(net)),
            "0 of this module is a DistributedDataParallel, which",
        ),
        (lambda net: nn.Linear(2, 2), "none of the model's parameters; a compression serves one model"),
        (lambda net: nn.Sequential(net, nn.Linear(2, 2)), r"lacks 2 parameter\(s\) of the model: 1.weight, 1.bias"),
        (lambda net: net.first, r"has 4 parameter\(s\) that the model does not have: second.weight"),
        (_fsdp, "this module has the class FullyShardedDataParallel, whose parameters"),
    ],
)
def test_what_cannot_work_is_refused(net: Net, compression: hvc.Compression, wrap: Any, text: str) -> None:
    with pytest.raises(hvc.ConfigError, match=text):
        compression.register(wrap(net))
    compression.register(net)  # the control
    assert passed(net) is None


def test_a_model_that_is_frozen_when_it_is_planned_is_refused(net: Net) -> None:
    net.first.requires_grad_(False)
    compression = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    net.first.requires_grad_(True)
    with pytest.raises(hvc.ConfigError, match=r"2 parameter\(s\) need a gradient now and were frozen when"):
        compression.register(net)
    compression.close()


def test_adding_up_is_for_what_was_registered(net: Net, compression: hvc.Compression) -> None:
    with pytest.raises(hvc.ConfigError, match=r"no_sync\(\) is for a model that was registered"):
        compression.no_sync()
    called = compression.register(DistributedDataParallel(net))
    with compression.no_sync():
        assert passed(called) is None
    assert compression.stats()["steps"] == 0
    assert passed(called) is None and compression.stats()["steps"] == 1


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_are_those_of_embeddings_that_say_so(sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    compression = hvc.Compression.none(model.named_parameters(), timeout=LONG)
    compression.register(model)
    found = model(torch.arange(3)).sum()
    if sparse:
        with pytest.raises(hvc.ConfigError, match=r"the gradient of 0.weight is dense, and an embedding with sparse"):
            found.backward()
    else:
        found.backward()
    compression.close()
    other = nn.Embedding(10, 4)
    compression = hvc.Compression.none(other.named_parameters(), timeout=LONG)
    compression.register(other)
    with pytest.raises(hvc.ConfigError, match="the gradient of weight is sparse, and no embedding with sparse=True"):
        torch.nn.functional.embedding(torch.arange(3), other.weight, sparse=True).sum().backward()
    compression.close()


# ---- what keeps what ----


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_a_compression_lives_as_long_as_its_module(closes: bool, hooked: bool) -> None:
    """Also where a hook of the program leads from a parameter back to the module."""
    before = threading.active_count()
    model = Net()
    if hooked:
        model.first.weight.register_hook(lambda grad, leads_to=model: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvc.Compression.topk(model.named_parameters(), timeout=LONG)
    compression.register(model, optimizer)
    reducer, gone = compression._here().reducer, weakref.ref(compression)
    if closes:
        compression.close()
    del compression
    gc.collect()
    assert (passed(model) is None) != closes and gone() is not None
    del model, optimizer
    end = time.monotonic() + 10.0
    while (gone() or threading.active_count() > before) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None and reducer.failure.closing and threading.active_count() <= before


def test_parameters_whose_module_is_gone_say_so() -> None:
    net = Net()
    outer = nn.Sequential(net)
    hvc.Compression.topk(net.named_parameters(), timeout=LONG).register(outer)
    assert passed(net) is None
    del outer
    gc.collect()
    assert "the module that this compression was registered with is gone" in str(passed(net))


def test_a_copy_has_no_compression(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert passed(other) is None
        assert equal(grads(other), expected(lambda alone: loss(alone).backward()))
    assert compression.stats()["steps"] == 0


COMPILED = """
import sys, torch
import torch.distributed as dist
import horovod_compress.ddp as hvc
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
compiled = torch.compile(model, backend="aot_eager")
compression = hvc.Compression.none(compiled.named_parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
compression.register(compiled, optimizer)
for step in range(5):
    optimizer.zero_grad()
    compiled(torch.ones(1, 4)).square().sum().backward()
    mine = [p.grad.clone() for p in model.parameters()]
    assert compression.stats()["steps"] == step + 1
    expected = torch.autograd.grad(model(torch.ones(1, 4)).square().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, expected))
    optimizer.step()
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_a_compiled_module(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(tmp_path / "store2")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ended.returncode == 0 and ended.stdout == "1\n", ended.stderr


WHOLE = """
import sys, torch
import torch.distributed as dist
import horovod_compress.ddp as hvc
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def train(wrapped, compiled):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    compression = hvc.Compression.topk(model.named_parameters(), density=0.5, min_elements=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = torch.nn.parallel.DistributedDataParallel(model) if wrapped else model
    compression.register(called, optimizer)

    def step(given):
        optimizer.zero_grad()
        called(given).square().sum().backward()
        optimizer.step()

    step = torch.compile(step, backend="eager") if compiled else step
    for number in range(6):
        step(torch.full((1, 4), float(number)))
    assert compression.stats()["steps"] == 6
    compression.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

for wrapped in (False, True):
    assert torch.allclose(train(wrapped, True), train(wrapped, False), atol=1e-6)
"""


@pytest.mark.slow
def test_a_step_that_is_compiled_with_its_backward_pass(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WHOLE, str(tmp_path / "store2")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it compiles
def test_compiled_autograd_is_refused_where_it_runs(net: Net, compression: hvc.Compression) -> None:
    import torch._dynamo

    def backward() -> Tensor:
        found = loss(net)
        found.backward()
        return found

    compression.register(net)
    alone = expected(lambda alone: loss(alone).backward())
    try:
        with torch._dynamo.config.patch(compiled_autograd=True):
            # The control: autograd itself runs a pass outside of what is compiled.
            torch.compile(loss, backend="eager")(net).backward()
            assert equal(grads(net), alone) and compression.stats()["steps"] == 1
            net.zero_grad()
            with compression.no_sync():
                torch.compile(backward, backend="eager")()
            assert equal(grads(net), alone) and compression.stats()["steps"] == 1
            net.zero_grad()
            with pytest.raises(hvc.ConfigError, match="compiled autograd has no end"):
                torch.compile(backward, backend="eager")()
        net.zero_grad()
        backward()
    finally:
        torch._dynamo.reset()
    assert equal(grads(net), alone) and compression.stats()["steps"] == 2


def test_gradients_of_gradients_are_refused(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    with pytest.raises(hvc.ConfigError, match="create_graph=False"):
        net(torch.ones(2, 4)).sum().backward(create_graph=True)


def test_an_error_at_the_end_of_a_pass_is_told_to_all(
    net: Net, compression: hvc.Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    compression.register(net)
    session = compression._session
    assert session is not None
    monkeypatch.setattr("horovod_compress.fronts.torch_dist.unwrapped.gradient_of", lambda parameter: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(torch.ones(2, 4), whole=False).sum().backward()
    assert session.failure.broken is not None


# ---- what is easily mistaken ----


class Around(nn.Module):
    """Runs a module, by one of several ways."""

    def __init__(self, net: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self._run = net, run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.net, x)


def checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda net, x: checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]


#: What is registered, and what is trained.
IN_WRAPPERS: dict[str, Callable[[Net], tuple[nn.Module, nn.Module]]] = {
    "itself": lambda net: (net, DistributedDataParallel(net)),
    "one layer": lambda net: (net, Around(DistributedDataParallel(net.first), lambda d, x: net.last(net.second(d(x))))),
    "within another": lambda net: (Around(net, lambda d, x: d(x)), DistributedDataParallel(net)),
    "another around it": lambda net: (net, DistributedDataParallel(Around(net, lambda d, x: d.forward(x)))),
    "reentrant checkpoint": lambda net: (net, DistributedDataParallel(Around(net, checkpointed(reentrant=True)))),
    "checkpoint": lambda net: (net, DistributedDataParallel(Around(net, checkpointed(reentrant=False)))),
    "compiled": lambda net: (torch.compile(net, backend="eager"), DistributedDataParallel(net)),
    "compiled in it": lambda net: (net, DistributedDataParallel(torch.compile(net, backend="eager"))),
    "compiled with it": lambda net: (net, torch.compile(DistributedDataParallel(net), backend="eager")),
    "static": lambda net: (net, DistributedDataParallel(net, static_graph=True)),
    "replicated": lambda net: (net, replicate(net)),
}


AVERAGED = "rank 0: this model is trained in DistributedDataParallel, which averages its gradients too: register the"


@pytest.mark.parametrize("form", IN_WRAPPERS)
def test_a_module_that_is_trained_in_a_wrapper_is_refused(net: Net, compression: hvc.Compression, form: str) -> None:
    """Both would write its gradients, one after the other."""
    given, trained = IN_WRAPPERS[form](net)
    compression.register(given)
    assert AVERAGED in str(passed(trained))


@pytest.mark.parametrize("first", ["a step", "no_sync", "a step before the wrapper"])
def test_a_wrapper_is_refused_whenever_it_comes(net: Net, compression: hvc.Compression, first: str) -> None:
    compression.register(net)
    if first == "a step before the wrapper":
        assert passed(net) is None
    wrapped = DistributedDataParallel(net)
    if first == "no_sync":
        with wrapped.no_sync():
            assert passed(wrapped) is None
    elif first == "a step":
        assert passed(net) is None
    assert AVERAGED in str(passed(wrapped))


def test_a_wrapper_that_averages_nothing_may_stay(net: Net, compression: hvc.Compression) -> None:
    """As for an evaluation."""
    before = DistributedDataParallel(net)
    compression.register(net)
    for wrapped in (before, DistributedDataParallel(net)):
        with torch.no_grad():
            wrapped(torch.ones(3, 4))
        with wrapped.no_sync():
            assert passed(wrapped) is None
        assert passed(net) is None


def test_a_static_graph_s_wrapper_that_only_added_up_may_stay(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    wrapped = DistributedDataParallel(net, static_graph=True)
    with compression.no_sync():
        assert passed(wrapped) is None
    assert passed(net) is None


@pytest.mark.parametrize("first", ["register", "wrap"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_wrapper_averages_what_needed_a_gradient_when_it_was_made(
    net: Net, compression: hvc.Compression, first: str, frozen: bool
) -> None:
    """Whatever may be frozen when the model is registered."""
    if first == "register":
        compression.register(net)
    net.requires_grad_(not frozen)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), net))
    net.requires_grad_(frozen)
    if first == "wrap":
        compression.register(net)
    net.requires_grad_(True)
    assert (AVERAGED in str(passed(wrapped))) is not frozen


def test_a_wrapper_is_seen_that_was_made_as_a_copy() -> None:
    """Which puts no module into another one, as far as torch tells."""
    wrapped = copy.deepcopy(DistributedDataParallel(Net()))
    compression = hvc.Compression.none(wrapped.module.named_parameters(), timeout=LONG)
    compression.register(wrapped.module)
    assert AVERAGED in str(passed(wrapped))
    compression.close()


def test_a_wrapper_is_seen_where_the_garbage_collector_does_not_look(net: Net, compression: hvc.Compression) -> None:
    """As programs have it that fork."""
    wrapped = DistributedDataParallel(net)
    gc.freeze()  # for good: unfreezing would give the collector what tests/conftest.py has taken from it, too
    compression.register(net)
    assert AVERAGED in str(passed(wrapped))


class Making(nn.Module):
    """Makes modules, and puts one into another, as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.current = self.layer
        return nn.Sequential(nn.Tanh(), Around(nn.Tanh(), lambda net, x: net(x)))(self.current(x))  # type: ignore[no-any-return]


def test_others_that_make_modules_are_compiled_as_ever(net: Net, compression: hvc.Compression) -> None:
    compression.register(net)
    made, x = Making(), torch.ones(3, 4)
    try:
        assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(x), made(x))
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_becomes_of_a_registered_module_knows_no_compression(net: Net, compression: hvc.Compression) -> None:
    """Copies for a moving average are saved as they are, and loaded where this package is not."""
    compression.register(net)
    for made in (copy.deepcopy(net), torch.optim.swa_utils.AveragedModel(net).module):
        saved = io.BytesIO()
        torch.save(made, saved)
        assert b"horovod_compress." not in saved.getvalue() and made._horovod_compress is None
        torch.jit.script(nn.Sequential(made.first, made.second))
    assert passed(DistributedDataParallel(copy.deepcopy(net))) is None


class Summed(nn.Module):
    """Parameters of which torch lays the gradients into one memory: at one place, or where they overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, given: Tensor, apart: int) -> Tensor:
        none = torch.zeros(apart)
        both = torch.cat([self.first, none]) + torch.cat([none, self.second])
        return (given[: 6 + apart] * both).square().sum()


@pytest.mark.parametrize("apart", [0, 2, 6])
@pytest.mark.parametrize("counted", [True, False])
def test_gradients_that_torch_lays_into_one_memory_are_taken_apart(
    apart: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch does not count references to memory: all are copied then."""
    if not counted:
        monkeypatch.setattr(fresh, "_alone", dict)
    net, alone, given = Summed(), Summed(), torch.arange(12.0)
    compression = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    compression.register(net)
    for _ in range(2):
        net.zero_grad()
        alone.zero_grad()
        net(given, apart).backward()
        alone(given, apart).backward()
        memory = [one.grad.untyped_storage().data_ptr() for one in net.parameters() if one.grad is not None]
        assert len({*memory}) == 2
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    kept = [one.grad.untyped_storage().data_ptr() for one in alone.parameters() if one.grad is not None]
    assert len({*kept}) == 1  # the control
    compression.close()


def test_no_hook_of_a_closed_compression_makes_a_pass_slower() -> None:
    net = Summed()
    for _ in range(2):
        compression = hvc.Compression.none(net.named_parameters(), timeout=LONG)
        compression.register(net)
        compression.close()
    for one in net.parameters():
        assert not one._backward_hooks and len(one._post_accumulate_grad_hooks) == 1  # type: ignore[attr-defined]


def test_a_parameter_that_a_function_brings_no_gradient_of_counts_as_unused() -> None:
    net = Summed()
    compression = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    compression.register(net)
    for given in (2.0, 4.0):  # the second time, it is added to what is there
        OfOne.apply(net.first, net.second).sum().backward()
        assert net.first.grad is not None and net.first.grad.tolist() == [given] * 6
        assert net.second.grad is not None and net.second.grad.tolist() == [0.0] * 6
    assert compression.stats()["steps"] == 2
    compression.close()


@pytest.mark.parametrize("how", ["views", "data"])
def test_gradients_that_a_program_lays_into_memory_of_its_own_stay_there(how: str) -> None:
    net, given, flat = Summed(), torch.arange(12.0), torch.zeros(12)
    compression = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    compression.register(net)
    for place, one in zip((flat[:6], flat[6:]), net.parameters(), strict=True):
        one.grad = place if how == "views" else torch.zeros(6)
        one.grad.data = place
    for _ in range(2):
        flat.zero_()
        net(given, 0).backward()
        expected = [one.grad for one in net.parameters() if one.grad is not None]
        assert torch.equal(flat, torch.cat(expected)) and flat.any()
        assert expected[0].data_ptr() == flat.data_ptr()
    compression.close()


def test_a_gradient_that_comes_outside_of_a_backward_pass_is_refused(net: Net, compression: hvc.Compression) -> None:
    """As schedules of torch.distributed.pipelining bring those of models that fully_shard() divides."""
    compression.register(net)
    *_, hook = net.first.weight._post_accumulate_grad_hooks.values()  # type: ignore[union-attr]
    net.first.weight.grad = torch.ones(4, 4)
    with pytest.raises(hvc.ConfigError, match=r"first.weight comes outside of backward\(\), as schedules of"):
        hook(net.first.weight)
    assert passed(net) is None  # the control


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_module_is_exchanged(net: Net) -> None:
    scripted = torch.jit.script(nn.Sequential(net.first, net.second))
    given = hvc.Compression.none(scripted.named_parameters(), timeout=LONG)
    try:
        given.register(scripted)
        assert passed(scripted) is None and given.stats()["steps"] == 1
    finally:
        given.close()


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_that_is_divided_belongs_to_another_module(net: Net, compression: hvc.Compression, whole: bool) -> None:
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    if whole:  # the root's parameters are for now, behind a forward pass
        net(torch.ones(3, 4))
    with pytest.raises(hvc.ConfigError, match=r"this module is divided among ranks, .* import horovod_compress.fsdp"):
        compression.register(net)


def test_where_ranks_have_different_parts_the_error_names_the_other_module(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*given: object) -> None:
        raise MismatchError("the ranks do not agree on parameter 0", about="parameter 0")

    def differ_in_an_option(*given: object) -> None:
        raise MismatchError("the ranks do not agree on seed, of every parameter", about="seed")

    monkeypatch.setattr(BaseCompression, "_connect_with", differ)
    with pytest.raises(MismatchError, match=r"on parameter 0$"):  # the control
        hvc.Compression.none(net.named_parameters(), timeout=LONG)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(MismatchError, match=r"on parameter 0; .* import horovod_compress.fsdp instead"):
        hvc.Compression.none(net.named_parameters(), timeout=LONG)
    monkeypatch.setattr(BaseCompression, "_connect_with", differ_in_an_option)
    with pytest.raises(MismatchError, match=r"of every parameter$"):
        hvc.Compression.none(net.named_parameters(), timeout=LONG)


@pytest.mark.parametrize("given", [lambda net: net.parameters(), lambda net: None, lambda net: 3])
def test_what_is_no_list_of_named_parameters_is_told(net: Net, given: Callable[[Net], Any]) -> None:
    with pytest.raises(hvc.ConfigError, match=r"write model.named_parameters\(\)"):
        hvc.Compression.none(given(net), timeout=LONG)


def test_what_torch_makes_of_an_optimizer_without_state_is_no_step(net: Net, compression: hvc.Compression) -> None:
    """It sets rates to 0 for that, and would not set them back after an error."""
    given = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    hvc.DistributedUpdateOptimizer(given, net.named_parameters(), compression)
    get_state_dict(net, given)
    assert given.param_groups[0]["lr"] == 0.1


def test_the_optimizer_that_was_given_to_update_mode_makes_no_step(net: Net, compression: hvc.Compression) -> None:
    """Its steps would be those of one rank, and no word of it."""
    given = torch.optim.SGD(net.parameters(), lr=0.1)
    made = hvc.DistributedUpdateOptimizer(given, net.named_parameters(), compression)
    loss(net).backward()
    with pytest.raises(hvc.ConfigError, match=r"write optimizer = hvc.DistributedUpdateOptimizer\(optimizer"):
        given.step()
    made.step()
    compression.close()
    given.step()  # nothing is exchanged any more
    other = hvc.Compression.none(net.named_parameters(), timeout=LONG)
    again = hvc.DistributedUpdateOptimizer(given, net.named_parameters(), other)
    again.step()
    other.close()


@pytest.mark.parametrize("what", ["create", "load", "register"])
@pytest.mark.parametrize("method", ["marsit", "powersgd", "dgc"])
def test_inference_mode_around_what_begins_a_training_changes_nothing(what: str, method: str) -> None:
    def train(where: str) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch.inference_mode(where == "create"):
            made = hvc.Compression.create(method, model.named_parameters(), timeout=LONG, min_elements=1)
        with torch.inference_mode(where == "register"):
            made.register(model, optimizer)
        for step in range(4):
            if step == 2:
                state = made.state_dict()
                with torch.inference_mode(where == "load"):
                    made.load_state_dict(state)
            optimizer.zero_grad()
            assert passed(model) is None
            optimizer.step()
        made.close()
        return [one.detach().clone() for one in model.parameters()]

    assert equal(train(what), train("nowhere"))
