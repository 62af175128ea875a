"""`hvd-compress headroom` and `hvd-compress bench` in one process: what they conclude, print and refuse."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod_compress import cli
from horovod_compress.verbs import bench, headroom

ROOT = Path(__file__).resolve().parents[2]

# ---- headroom ---------------------------------------------------------------------------------


def found(fp32: float, fp16: float, none: float, marsit: float, compute_ms: float | None = None) -> dict[str, Any]:
    """Return the document of four measurements in milliseconds."""
    names = {"horovod fp32": fp32, "horovod fp16": fp16, "none": none, "marsit": marsit}
    timings = [{"name": n, "median_seconds": ms / 1e3, "spread_seconds": 0.001} for n, ms in names.items()]
    return headroom.document(argparse.Namespace(elements=1000, compute_ms=compute_ms), 4, timings)


def test_a_method_that_pays_is_compared_with_the_fastest_of_the_others() -> None:
    document = found(200, 150, 100, 50)
    assert document["pays"] and document["against"] == "none"
    assert document["times_faster"] == pytest.approx(2) and document["saved_seconds"] == pytest.approx(0.05)
    heading, *rows, verdict = headroom.text(document).splitlines()
    assert "1,000 float32 values, 4 ranks" in heading and len(rows) == 4
    assert verdict == (
        "marsit can pay: it takes 50.0 ms less than none, the fastest without it, and is 2.0 times as fast."
    )


@pytest.mark.parametrize(
    ("milliseconds", "advice"),
    [
        ((100, 110, 120, 105), "horovod fp32 takes 100.0 ms, marsit 105.0 ms. Leave the compression out."),
        ((100, 97, 120, 96), "horovod fp32 takes 100.0 ms, marsit 96.0 ms. Leave the compression out."),
        ((200, 80, 120, 90), "horovod fp16 takes 80.0 ms, marsit 90.0 ms. Horovod's own fp16 is the best of these"),
        ((200, 190, 80, 90), "none takes 80.0 ms, marsit 90.0 ms. Method none, which does not compress, is the best"),
    ],
)
def test_what_the_transport_does_is_not_the_merit_of_compression(
    milliseconds: tuple[float, float, float, float], advice: str
) -> None:
    document = found(*milliseconds)
    assert not document["pays"]
    assert f"marsit does not pay here: {advice}" in headroom.text(document)


def test_the_gain_of_a_step_is_shorter_or_longer_and_never_negative() -> None:
    shorter, longer = found(100, 100, 100, 50, compute_ms=100), found(100, 100, 100, 120, compute_ms=100)
    assert shorter["step_gain"] == pytest.approx(0.25) and shorter["most_step_gain"] == pytest.approx(0.5)
    assert "a step gets 25% shorter than with horovod fp32" in headroom.text(shorter)
    assert "a step gets 10% longer than with horovod fp32" in headroom.text(longer)
    assert "-" not in headroom.text(longer).splitlines()[-1]
    assert "step_gain" not in found(100, 100, 100, 50)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elements", "0"], "--elements has to be at least 1"),
        (["--repeat", "1"], "--repeat at least 2"),
        (["--method", "nothing"], "unknown method 'nothing'; choose one of: "),
    ],
)
def test_wrong_arguments_are_refused_before_horovod_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["headroom", *words]) == 2
    assert said in capsys.readouterr().err


def test_one_rank_has_nobody_to_exchange_with() -> None:
    pytest.importorskip("horovod.torch")
    words = [sys.executable, "-m", "horovod_compress.cli", "headroom"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    done = subprocess.run(words, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "nobody to exchange with" in done.stderr and "horovodrun -np 4" in done.stderr


# ---- bench ------------------------------------------------------------------------------------

TINY = ["kernels", "--count", "2048", "--repeat", "1", "--filter", "checksum"]


def test_without_the_source_there_are_no_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "horovod_compress" / "verbs" / "bench.py"))
    assert cli.main(["bench", *TINY]) == 2
    assert "not part of an installed package" in capsys.readouterr().err


def test_a_benchmark_takes_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY]) == 0
    assert "triad" in capsys.readouterr().out


def test_records_are_printed_and_the_header_has_the_words_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", "bench", *TINY]) == 0
    said = capsys.readouterr()
    first, *records = map(json.loads, said.out.splitlines())
    assert first["name"] == "header" and first["command"][-7:] == ["benchmarks.kernels", *TINY[1:]]
    assert records and all(record["bench"] == "kernels" for record in records)
    assert "triad" in said.err  # tables are for people


def test_an_unknown_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "everything"])
    assert "invalid choice" in capsys.readouterr().err


# ---- list -------------------------------------------------------------------------------------


def test_list_has_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    from horovod_compress.codecs import registry

    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in shown if line} >= set(registry.available())
    assert cli.main(["list", "--json"]) == 0
    methods = {one["method"]: one for one in reversed(json.loads(capsys.readouterr().out)["methods"])}
    assert set(methods) == set(registry.available())
    assert methods["none"]["bits"] == 32 and methods["none"]["kept_bytes"] == 0 and methods["none"]["unbiased"]
    assert 1 <= methods["marsit"]["bits"] < 1.2 and methods["marsit"]["kept_bytes"] == 4
    assert 0.08 < methods["sparse_binary"]["bits"] < 0.1 and methods["sparse_binary"]["collectives"] == ["gather"]
    assert methods["sketch_fusion"]["conserves"] and not methods["sketch_fusion"]["unbiased"]
