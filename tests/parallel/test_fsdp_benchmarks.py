"""The benchmarks of divided models: what they count is what a formula says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from benchmarks import fsdp, fsdp_memory
from tests.support.marks import needs_lab

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]
SMALL = ["--width", "64", "--layers", "2", "--vocabulary", "3000"]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


@needs_lab()
def test_hosts_send_their_shards(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    cases = ['native={"native": "float32"}', 'marsit={"method": "marsit", "full_precision_every": 0}']
    words = [word for case in cases for word in ("--case", case)]
    assert fsdp.main([*SMALL, "--rate", "1gbit", "--steps", "3", *words, "--json", str(path)]) == 0
    native, marsit = records(path)
    gradients = 4 * native["parameters"]  # of two replicas, each host sends as many bytes as the model has
    assert gradients < native["host_bytes_per_step"] < 1.2 * gradients
    assert marsit["host_bytes_per_step"] < 0.2 * gradients
    assert native["wrong"] == marsit["wrong"] == 0


def test_a_rank_keeps_and_sends_its_shard_only(tmp_path: Path) -> None:
    """A residual, and the payload of full-precision rounds."""
    path = tmp_path / "memory.json"
    assert fsdp_memory.main([*SMALL, "--methods", "native,marsit", "--json", str(path)]) == 0
    native, marsit = (record["bytes"] for record in records(path))
    shard = native["parameters"]
    assert native["kept"] == 0 and marsit["kept"] == pytest.approx(shard, rel=0.05)
    assert marsit["others"] - native["others"] == pytest.approx(1.05 * shard, rel=0.05)
