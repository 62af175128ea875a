"""Every method holds as much memory as the table in docs/memory.md says, before the first step and after many."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.work import Layout
from horovod_compress.schedule.plan import Bucket
from tests.support.local import Fleet, spec
from tests.support.marks import slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
RANKS, ELEMENTS = 4, 1_000_000
#: Multiples of the model; a row of the table has two digits.
ROUNDING = 0.011
QUICK = ("none", "marsit", "topk")


def rows() -> dict[str, list[float]]:
    """Return the numbers of the table, by method."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name.strip("`"): [float(number) for number in numbers] for name, *numbers in lines}


@pytest.mark.parametrize("method", [*QUICK, *slow(*sorted(set(registry.methods()) - set(QUICK)))])
def test_memory_is_what_the_table_says(method: str) -> None:
    found = memory.measure(registry.codec_class(method)(), RANKS, ELEMENTS)
    numbers = [found.kept, found.buffers, found.frames, found.total]
    assert numbers == pytest.approx(rows()[method], abs=ROUNDING)
    # Only frames come with the first steps: what does not fit is known at the start.
    assert found.created == pytest.approx(found.total - found.frames, abs=0.05)


def test_the_table_has_every_method() -> None:
    assert list(rows()) == registry.methods()
    assert all(sum(parts) == pytest.approx(total, abs=2 * ROUNDING) for *parts, total in rows().values())


def test_memory_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative: a method that keeps a copy of its payload."""
    codec = registry.codec_class("none")
    usual = codec.layout

    def keeps(self: Codec, bucket: Bucket, world: int) -> Layout:
        return replace(usual(self, bucket, world), local={"copy": (torch.float32, bucket.padded)})

    monkeypatch.setattr(codec, "layout", keeps)
    found = memory.measure(codec(), 2, ELEMENTS)
    assert found.total > rows()["none"][-1] + 0.9


def test_what_others_hold_does_not_count() -> None:
    with Fleet(2, [spec("other", 1000, 100)], "topk"):
        found = memory.measure(registry.codec_class("signsgd")(), RANKS, ELEMENTS)
    assert found.total == pytest.approx(rows()["signsgd"][-1], abs=ROUNDING)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.json"
    given = ["--ranks", "2", "--elements", "40000", "--methods", "none,topk", "--json", str(path)]
    assert memory.main(given) == 0
    found = json.loads(path.read_text())
    assert [row["method"] for row in found["memory"]] == ["none", "topk"] and found["options"]["ranks"] == 2
    assert capsys.readouterr().out.count("| `") == 2
