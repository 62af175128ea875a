"""Ranks on processors of several kinds get the same bits, whatever the roots that torch takes there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod_compress
from tests.golden import runs
from tests.golden.play import TORCH_ROUNDS_ALIKE

#: Lets MKL take roots as it does on old processors.
OLD = {"MKL_CBWR": "COMPATIBLE"}
NAME = "marsit merge=shaped step_size=row full_precision_every=3 levels=2 | AdamW, held"
PLAYED = f"""
import json
import numpy as np
import torch
from types import SimpleNamespace
from horovod_compress import ops
from horovod_compress.engine.optimizer import held_moment
from tests.golden import runs

torch.set_num_threads(1)
x = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 0.001
found = {{
    "torch is wrong": int((x.sqrt().numpy() != np.sqrt(x.numpy())).sum()),
    "we are wrong": int((ops.take_roots(x.clone()).numpy() != np.sqrt(x.numpy())).sum()),
    "run": runs.RUNS[{NAME!r}].play(),
}}
held_moment.ops = SimpleNamespace(take_roots=torch.Tensor.sqrt_)
found["torch's run"] = runs.RUNS[{NAME!r}].play()
print(json.dumps(found))
"""


#: What uses torch's roots, and why it may.
OWN_ROOTS = {
    "fronts/optim.py": "an optimizer, which rounds as torch's do",
    "codecs/shared/elias.py": "predicts errors",
    "codecs/global_qsgd.py": "predicts errors",
    "codecs/qsgd.py": "predicts errors",
    "codecs/terngrad.py": "predicts errors",
    "ops/dense.py": "on a GPU",
}


def test_nothing_else_takes_roots_by_torch() -> None:
    package = Path(horovod_compress.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "reference" not in path.parts and re.search(r"(?<!math)(?<!np)\.r?sqrt_?\(|\.pow\(1 /", path.read_text())
    }
    assert found == set(OWN_ROOTS)


@pytest.mark.skipif(not TORCH_ROUNDS_ALIKE, reason="torch rounds differently on this processor")
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_a_run_finds_the_same_where_torch_takes_other_roots() -> None:
    """What it finds here, by test_runs.py, it finds there."""
    done = subprocess.run(
        [sys.executable, "-c", PLAYED], env=os.environ | OLD, capture_output=True, text=True, check=True
    )
    there: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    always = json.loads(runs.FILE.read_text())[NAME]
    assert not there["we are wrong"] and there["run"] == always
    assert there["torch is wrong"], "the control: MKL has another mode"
    assert there["torch's run"] != always, "the control: a run sees roots"
