"""At a prompt: mistakes are told before ranks are needed, names are those to use, help says what defaults do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import horovod_compress.ddp as hvc
from horovod_compress.codecs import registry
from tests.support.jobs import ALONE

SCRIPT = """
import importlib, json, sys
import torch

hvc = importlib.import_module(sys.argv[1])
named = list(torch.nn.Linear(3, 4).named_parameters())
make, found = hvc.Compression, {}
for text in json.load(sys.stdin):
    try:
        eval(text, {"hvc": hvc, "make": make, "named": named})
    except Exception as error:
        found[text] = [type(error).__name__, str(error)]
json.dump(found, sys.stdout)
"""
WRONG = {
    "make.topk(named, ratio=0.1)": "topk has no option 'ratio'",
    "make.topk(named, density=7)": "density should be a number above 0, at most 1, got 7",
    'make.topk(named, exchange="ring")': "topk can be exchanged by gather only",
    'make.topk(named, schedule="nothing")': "schedule should be",
    'make.topk(named, transport="glooo")': "transport should be one of",
    'make.marsit(named, merge="shapd")': "merge should be",
    'make.create("masrit", named)': "did you mean 'marsit'?",
    'make.create(named, "marsit")': "a method should be a name",
    'make.per_layer({"*": "masrit"}, named)': "did you mean 'marsit'?",
    'make.per_layer({"nothing": "topk", "*": "none"}, named)': "from the pattern 'nothing'",
    "make.topk([])": "holds no parameter that needs a gradient",
    "make.topk(named + named)": "twice",
}
needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
FRONTS = {
    "horovod_compress.ddp": "call torch.distributed.init_process_group()",
    "horovod_compress.torch": "call hvd.init()",
}


@pytest.mark.parametrize(
    "front", ["horovod_compress.ddp", pytest.param("horovod_compress.torch", marks=[needs_horovod, pytest.mark.slow])]
)
def test_mistakes_are_told_where_there_are_no_ranks(front: str) -> None:
    """In a process of its own, which has joined no job."""
    right = "make.topk(named)"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, front],
        input=json.dumps([*WRONG, right]),
        env=ALONE,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    for text, said in (WRONG | {right: FRONTS[front]}).items():
        kind, told = found[text]
        assert kind == "ConfigError" and said in told, f"{text}: {kind}: {told}"


@pytest.fixture
def compression(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(3, 4)
    found = hvc.Compression.topk(model.named_parameters(), density=0.5, timeout=9)
    found.register(torch.nn.parallel.DistributedDataParallel(model))
    yield found
    found.close()
    dist.destroy_process_group()


def test_it_says_its_method_options_and_ratio(compression: Any) -> None:
    # The ratio of a job: tests/parallel/test_reports.py
    assert repr(compression) == "<Compression topk density=0.5 timeout=9: 1 bucket, step 0; nothing sent yet>"


def test_names_are_those_to_use(compression: Any) -> None:
    used = {*registry.available(), "create", "per_layer", "register", "attach", "follow", "stats", "plan", "publish"}
    used |= {"save", "load", "state_dict", "load_state_dict", "close", "no_sync"}
    assert dir(hvc.Compression) == sorted(used)
    assert dir(compression) == sorted({*used, "method"})


@needs_horovod
def test_names_under_horovod_are_those_to_use() -> None:
    other = importlib.import_module("horovod_compress.torch").Compression
    assert set(dir(other)) ^ set(dir(hvc.Compression)) == {"compress", "decompress", "register", "no_sync"}


@pytest.mark.parametrize("name", registry.methods())
def test_help_opens_with_what_the_default_does(name: str) -> None:
    """Whoever changes a default reads this: a share or a number of bits in the first line is that of the default."""
    shown = (getattr(hvc.Compression, name).__doc__ or "").splitlines()[0]
    codec = registry.create(name)
    if (density := getattr(codec, "density", None)) is not None:
        assert f"{100 * density:g} %" in shown
    if name in ("qsgd", "global_qsgd", "terngrad"):
        assert codec.bits == 8 and "eight bits" in shown.lower()  # type: ignore[attr-defined]
    if name == "marsit":
        assert codec.levels == 3 and codec.full_precision_every == 50  # type: ignore[attr-defined]
        assert "-1, 0 or 1" in shown and "Every 50th round" in (hvc.Compression.marsit.__doc__ or "")
    assert len(shown) < 120
