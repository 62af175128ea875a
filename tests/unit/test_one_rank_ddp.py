"""What can be seen of the front for DistributedDataParallel with one rank, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc

LONG = 30.0


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, which met by a file: nothing in the environment tells of it."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pair(**options: Any) -> tuple[nn.Module, hvc.Compression]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, hvc.Compression.topk(model.named_parameters(), timeout=LONG, **options)


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
    offer, last = compression._offer, len(list(model.parameters()))
    offered: list[int] = []

    def then_close(index: int, grad: torch.Tensor) -> int:
        step = offer(index, grad)
        offered.append(index)
        if closes and len(offered) == last:
            other = threading.Thread(target=compression.close)
            other.start()
            other.join()
        return step

    compression._offer = then_close  # type: ignore[method-assign]
    error = backward(called)
    assert len(offered) == last
    assert isinstance(error, hvc.ExchangeError) == closes, error
    compression.close()
