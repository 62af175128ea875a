"""What can be seen of the front for DistributedDataParallel with one rank, in this process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from horovod_compress.fronts.scale import Scale
from horovod_compress.fronts.torch_dist import job

LONG = 30.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, which met by a file: nothing in the environment tells of it."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pair(method: str = "topk", **options: Any) -> tuple[nn.Module, hvc.Compression]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, hvc.Compression.create(method, model.named_parameters(), timeout=LONG, **options)


def backward(model: nn.Module) -> BaseException | None:
    """Run a backward pass, which has to end; return its error."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            model(torch.ones(1, 4)).sum().backward()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    assert found, "the backward pass hangs"
    return found[0]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}], ids=["", "static"])
def test_closing_in_the_middle_of_a_backward_pass_ends_it(closes: bool, ddp: dict[str, Any]) -> None:
    model, compression = pair()
    called = compression.register(DistributedDataParallel(model, **ddp))
    offer, last = compression._session.offer, len(list(model.parameters()))
    offered: list[int] = []

    def then_close(index: int, grad: torch.Tensor) -> int:
        step = offer(index, grad)
        offered.append(index)
        if closes and len(offered) == last:
            other = threading.Thread(target=compression.close)
            other.start()
            other.join()
        return step

    compression._session.offer = then_close  # type: ignore[method-assign]
    error = backward(called)
    assert len(offered) == last
    assert isinstance(error, hvc.ExchangeError) == closes, error
    compression.close()


FREEZINGS = {"never": None, "before wrapping": 0, "after wrapping": 1, "after registering": 2, "after a step": 3}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("when", FREEZINGS)
def test_a_parameter_may_be_frozen_at_any_time(when: str) -> None:
    """DistributedDataParallel hands nothing over for one that was frozen before it was given the model."""
    model, compression = pair()
    frozen = model[0]  # type: ignore[index]

    def come_to(stage: int) -> None:
        if stage == FREEZINGS[when]:
            frozen.requires_grad_(False)

    come_to(0)
    called = DistributedDataParallel(model, find_unused_parameters=True)
    come_to(1)
    compression.register(called)
    come_to(2)
    for _ in range(3):
        assert backward(called) is None
        come_to(3)
    assert compression.stats()["steps"] == 3 and compression._session.under_way == 0
    assert model[1].weight.grad is not None  # type: ignore[index]
    assert frozen.weight.grad is not None or FREEZINGS[when] is not None
    compression.close()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("use", ["nothing", "register", "hook", "attach"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_compression_that_was_never_used_says_so(use: str, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """At the first step of the optimizer, or where it is closed without one."""
    model, compression = pair()
    called, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    if use == "register":
        compression.register(called)
    elif use == "attach":
        compression.attach(optimizer)
    elif use == "hook":
        called.register_comm_hook(compression, hvc.ddp_hook)

    def told() -> int:
        return sum("topk has compressed nothing" in record.message for record in caplog.records)

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # another optimizer, and none of its gradients
    assert told() == 0
    assert backward(called) is None
    for _ in range(steps):
        optimizer.step()
        assert told() == (use in ("nothing", "attach"))
    for _ in range(2):
        compression.close()
    assert told() == (use in ("nothing", "attach"))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("steps", [0, 1])
def test_one_that_was_refused_a_model_tells_only_of_steps_without_it(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of register() has told the program; whoever trains all the same may train each rank alone."""
    model, compression = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hvc.ConfigError, match="match_norm should be"):
        compression.register(model, optimizer, match_norm="no")  # type: ignore[arg-type]
    for _ in range(steps):
        assert backward(model) is None
        optimizer.step()
    compression.close()
    assert sum("topk has compressed nothing" in text for text in caplog.messages) == steps


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("early", [False, True])
def test_the_next_step_after_a_failure_says_the_same(early: bool) -> None:
    """Not that torch's own reduction is in a state that it should not be in."""
    model, compression = pair()
    called = compression.register(DistributedDataParallel(model))
    failure = compression._here().reducer.failure
    if early:  # else in the middle of the backward pass
        failure.report("a test", hvc.ExchangeError("a link broke"))
        while not failure.failed():
            time.sleep(0.01)
    else:
        model[1].weight.register_hook(  # type: ignore[union-attr, index]
            lambda grad: failure.report("a test", hvc.ExchangeError("a link broke"))
        )
    for _ in range(3):
        error = backward(called)
        assert type(error) is hvc.ExchangeError and str(error) == "a link broke"
    compression.close()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", ["ignored", "delayed"])
def test_parameters_that_the_wrapper_leaves_out_are_called_so(how: str) -> None:
    model, compression = pair()
    with_them = dict(model.named_parameters())
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
        called = DistributedDataParallel(model)
    else:
        called = DistributedDataParallel(
            model,
            delay_all_reduce_named_params=[("1.bias", with_them["1.bias"])],
            param_to_hook_all_reduce=with_them["0.weight"],
        )
    text = r"leaves 1 parameter\(s\) of named_parameters out of its buckets: 1\.bias\. They"
    with pytest.raises(hvc.ConfigError, match=text):
        compression.register(called)
    compression.close()
    named = [(name, p) for name, p in model.named_parameters() if name not in called.parameters_to_ignore]
    compression = hvc.Compression.topk(named)
    compression.register(called)
    assert backward(called) is None and model[1].bias.grad is not None  # type: ignore[union-attr, index]
    compression.close()


@pytest.mark.usefixtures("group")
def test_a_reduction_in_python_is_refused() -> None:
    import torch._dynamo

    model, compression = pair()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        called = DistributedDataParallel(model)
    with pytest.raises(hvc.ConfigError, match="python_reducer"):
        compression.register(called)
    with pytest.raises(hvc.ConfigError, match="python_reducer"):
        hvc.ddp_hook(compression, (torch.ones(1), torch.ones(1)))  # type: ignore[arg-type]
    compression.close()


COMPILED = """
import sys, torch
import torch._dynamo
import torch.distributed as dist
import horovod_compress.ddp as hvc
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
compression = hvc.Compression.marsit(model.named_parameters())
called = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
compression.register(called, optimizer)
step, compiled = torch.compile(optimizer.step, backend="eager"), []
for _ in range(12):
    optimizer.zero_grad()
    called(torch.ones(1, 4)).sum().backward()
    step()
    compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
assert compiled[3] == compiled[-1] > 0, compiled
assert not torch._dynamo.utils.counters["graph_break"]
assert compression.stats()["steps"] == 12
"""


@pytest.mark.slow
def test_a_compiled_step_leaves_hooks_alone(tmp_path: Path) -> None:
    """Compiled, they would break the graph, and be compiled again in later steps, up to a limit of torch's."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ended.returncode == 0 and "recompile" not in ended.stderr, ended.stderr


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("registers", [False, True])
def test_what_nobody_refers_to_is_closed(registers: bool) -> None:
    before = threading.active_count()
    model, compression = pair()
    called, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    if registers:
        compression.register(called, optimizer)
        assert backward(called) is None
        optimizer.step()
    reducer = compression._here().reducer
    assert threading.active_count() > before and not reducer.failure.closing
    del model, called, optimizer, compression
    end = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < end:
        gc.collect()  # a model, and then what only its part in C++ refers to
        time.sleep(0.01)
    assert reducer.failure.closing and threading.active_count() <= before


AT_EXIT = """
import sys, torch
import torch.distributed as dist
import horovod_compress.ddp as hvc
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
compression = hvc.Compression.topk(model.named_parameters())
called = torch.nn.parallel.DistributedDataParallel(model)
if len(sys.argv) > 2:
    compression.register(called if sys.argv[2] == "register" else None)
called(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "status", "told"), [([], 0, True), (["register"], 0, False), (["fail"], 1, False)])
def test_so_does_one_that_nobody_closes(given: list[str], status: int, told: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", AT_EXIT, str(tmp_path / "store"), *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ended.returncode == status and ("topk has compressed nothing" in ended.stderr) == told


@pytest.mark.usefixtures("group")
def test_what_was_started_is_closed_if_the_rest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise OSError("no trace")

    before = threading.active_count()
    monkeypatch.setattr("horovod_compress.fronts.compression.recording.follow", fails)
    with pytest.raises(OSError, match="no trace"):
        pair()
    assert threading.active_count() == before
    monkeypatch.undo()
    compression = pair()[1]  # the control: there are threads to be ended
    assert threading.active_count() > before
    compression.close()
    assert threading.active_count() == before


def test_a_process_group_that_has_ended_is_forgotten(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("group")
    pair()[1].close()
    group = weakref.ref(dist.group.WORLD)
    assert group() in job._gathers
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


def test_a_state_is_there_also_when_the_process_group_has_ended(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("group")
    compression = pair()[1]
    before = compression.state_dict()
    dist.destroy_process_group()
    assert compression.state_dict().keys() == before.keys()
    compression.close()


@pytest.mark.usefixtures("group")
def test_the_hook_of_a_rank_outside_the_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.TorchJob, "included", lambda self: False)
    model, compression = pair()
    called = DistributedDataParallel(model)
    called.register_comm_hook(compression, hvc.ddp_hook)
    with pytest.raises(hvc.ConfigError, match="is not in this compression's process group"):
        raise backward(called) or AssertionError


def _through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", [copy.deepcopy, _through_a_file])
def test_a_copied_model_has_no_compression_and_says_so(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, compression = pair()
    called = compression.register(DistributedDataParallel(model))
    with pytest.raises(hvc.ConfigError, match="join"), called.join(throw_on_early_termination=False):
        pass
    made = [way(called), way(called)]
    assert sum("a compression is not saved or copied" in text for text in caplog.messages) == 1
    assert sum("it exchanges nothing, or gradients uncompressed under" in text for text in caplog.messages) == 2
    for found in (*made, way(made[0])):
        with found.join():
            assert backward(found) is None
    assert compression.stats()["steps"] == 0
    compression.close()


@pytest.mark.usefixtures("group")
def test_a_compression_that_is_saved_whole_says_so(caplog: pytest.LogCaptureFixture) -> None:
    compression = pair()[1]
    torch.save({"hvc": compression}, io.BytesIO())
    assert any("save compression.state_dict(), or compression.save(folder)" in text for text in caplog.messages)
    compression.close()


@pytest.mark.parametrize("given", [{}, {"method": "topk", "named_parameters": []}, {"density": 0.1}])
def test_a_compression_is_created_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(hvc.ConfigError, match=r"not called directly: write hvc.Compression.marsit\(model.named_param"):
        hvc.Compression(**given)


@pytest.mark.usefixtures("group")
def test_parameters_that_the_model_lacks_are_named() -> None:
    model, compression = pair()
    called = DistributedDataParallel(model[0])  # type: ignore[index]
    with pytest.raises(hvc.ConfigError, match=r"has 2 parameter\(s\) that the model does not have: 1.weight, 1.bias;"):
        compression.register(called)
    compression.close()


@pytest.mark.usefixtures("group")
def test_another_optimizer_is_refused_and_the_same_one_is_not() -> None:
    model, compression = pair()
    first = torch.optim.Adam(model[0].parameters())  # type: ignore[index]
    compression.register(DistributedDataParallel(model), first)
    compression.attach(first)
    with pytest.raises(hvc.ConfigError, match="already has an optimizer, Adam; give several in one call"):
        compression.attach(torch.optim.SGD(model[1].parameters(), lr=0.1))  # type: ignore[index]
    assert compression._session.steps.held
    del first
    gc.collect()
    with pytest.raises(hvc.ConfigError, match="already has an optimizer"):
        compression.attach(torch.optim.Adam(model.parameters()))
    compression.close()


@pytest.mark.usefixtures("group")
def test_two_compressions_do_not_save_into_one_folder(tmp_path: Path) -> None:
    (_, first), (_, second) = pair(), pair()
    first.save(tmp_path / "here")
    with pytest.raises(hvc.ConfigError, match="holds the checkpoint of another compression of this process"):
        second.save(tmp_path / "." / "here")
    first.load(tmp_path / "here")
    second.save(tmp_path / "there")
    first.close()
    second.save(tmp_path / "here")
    second.close()


@pytest.mark.usefixtures("group")
def test_the_next_compression_of_a_model_saves_where_the_last_one_did(tmp_path: Path) -> None:
    model, first = pair()
    first.save(tmp_path)
    second = hvc.Compression.topk(model.named_parameters())
    second.save(tmp_path)
    for compression in (first, second):
        compression.close()


class Scaler:
    """A gradient scaler whose scale is set by hand."""

    def __init__(self) -> None:
        self.scale = 8.0

    def get_scale(self) -> float:
        return self.scale

    def update(self, new_scale: float) -> None:
        self.scale = new_scale


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("ends", ["close", "fail"])
def test_a_scaler_may_outlive_a_compression(ends: str) -> None:
    scaler, (model, compression) = Scaler(), pair()
    called = compression.register(DistributedDataParallel(model))
    compression.follow(scaler)
    assert backward(called) is None
    if ends == "close":
        compression.close()
    else:
        compression._here().reducer.failure.report("a test", RuntimeError("over"))
        deadline = time.monotonic() + LONG
        while not compression._here().reducer.failure.failed() and time.monotonic() < deadline:
            time.sleep(0.01)
    model, compression = pair()
    called = compression.register(DistributedDataParallel(model))
    compression.follow(scaler)
    assert backward(called) is None
    before = compression._here().reducer.kept.residual_norm({})
    scaler.update(16.0)
    assert compression._here().reducer.kept.residual_norm({}) == pytest.approx(2 * before) and before
    compression.close()


@pytest.mark.usefixtures("group")
def test_a_scaler_keeps_no_compression_alive() -> None:
    scaler, compression = Scaler(), pair()[1]
    follower = Scale(compression._here().reducer)
    follower.follow(scaler)
    gone = weakref.ref(follower)
    scaler.update(4.0)
    assert follower.state() == {"scale": 4.0}
    del follower
    gc.collect()
    assert gone() is None
    scaler.update(2.0)
    compression.close()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_of_a_followed_scaler_has_a_scale_of_its_own(copied: Callable[[Any], Any]) -> None:
    scaler, (model, compression) = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), pair()
    compression.follow(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(torch.ones(1))  # only then has it a scale
    other = copied(scaler)
    other.scale(sum(parameter.sum() for parameter in model.parameters())).backward()
    other.step(optimizer)
    other.update()
    assert (scaler.get_scale(), other.get_scale()) == (4.0, 8.0)
    assert compression.state_dict()["scale"] == 4.0
    compression.close()


@pytest.mark.usefixtures("group")
def test_residuals_have_the_scale_that_the_scaler_has_last() -> None:
    """Also where it changes between a load and the next step; and those of a closed compression keep theirs."""
    scaler, (model, compression) = Scaler(), pair()
    compression.follow(scaler)
    called = compression.register(DistributedDataParallel(model))
    assert backward(called) is None
    state, before = compression.state_dict(), compression._here().reducer.kept.residual_norm({})
    scaler.update(32.0)
    compression.load_state_dict(state)
    scaler.update(16.0)
    assert compression._here().reducer.kept.residual_norm({}) == pytest.approx(2 * before) and before
    compression.close()
    scaler.update(64.0)
    assert compression.state_dict()["scale"] == 16.0
    assert compression._here().reducer.kept.residual_norm({}) == pytest.approx(2 * before)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("then", ["nothing", "follow", "reset", "no residual"])
def test_a_state_of_scaled_gradients_needs_its_scaler(then: str) -> None:
    method = "qsgd" if then == "no residual" else "topk"
    model, first = pair(method)
    first.follow(Scaler())
    assert backward(first.register(DistributedDataParallel(model))) is None
    state = first.state_dict()
    first.close()
    model, second = pair(method)
    called = second.register(DistributedDataParallel(model))
    second.load_state_dict(state, residuals="reset" if then == "reset" else "restore")
    if then == "follow":
        second.follow(Scaler())
    error = backward(called)
    if then == "nothing":
        assert isinstance(error, hvc.ConfigError) and "saved with gradients multiplied by 8" in str(error)
    else:
        assert error is None
    second.close()
