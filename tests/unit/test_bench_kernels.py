"""The benchmark of kernels times each with gradients of two types, and finds all of them right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernel_cases, kernel_table, kernels
from benchmarks.kernel_cases import Arrays, Case
from benchmarks.kernel_table import Line

COUNT = 40_500  # no multiple of a block or a word
#: What moves no gradients.
FLOAT32_ONLY = (
    "triad", "sign_pack float16", "merge_bits", "shaped_", "bernoulli_words", "majority_fold", "uniform_add",
    "uniform_fold", "exponential_merge", "exponential_fold", "qsgd_fold", "loco_fold", "binary_encode", "binary_clear",
    "union_count", "codebook_fit", "values_encode", "dense_offer to bfloat16", "dense_add", "sketch_top",
    "sketch_clear", "lowrank_orthonormalise", "record_fold", "crc32c", "hash64",
)  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    return {line.name: line for line in kernel_table.lines_of(COUNT, "")}


def test_every_case_runs_and_is_right_with_both_types(lines: dict[str, Line]) -> None:
    for line in lines.values():
        for case in line.cases.values():
            case.run()
        line.check()
    assert {name: line.wrong for name, line in lines.items() if any(line.wrong.values())} == {}
    unchecked = {name for name, line in lines.items() if not line.wrong and not kernel_cases.by_others(name)}
    assert all(name.startswith(("local step", "homomorphic step")) for name in unchecked)


def test_what_gradients_are_in_is_timed_with_both(lines: dict[str, Line]) -> None:
    once = {name for name, line in lines.items() if len(line.cases) == 1 and not kernel_cases.by_others(name)}
    assert {name for name in lines if name.startswith(FLOAT32_ONLY)} == once


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("sign_pack", 2 * COUNT),
        ("sign_decode own", 4 * COUNT),  # a gradient read, a result written
        ("absorb momentum", 4 * COUNT),
        ("adam_step_all", 10 * COUNT),  # all but the held second moment
        ("local step, AdamW, second moment held", 16 * COUNT),
    ],
)
def test_bytes_of_gradients_are_counted(lines: dict[str, Line], name: str, saved: int) -> None:
    cases = lines[name].cases
    assert cases["float32"].bytes_moved - cases["bfloat16"].bytes_moved == saved


def test_the_arrays_of_gradients_have_the_type_that_was_asked_for() -> None:
    arrays = Arrays(COUNT, torch.bfloat16)
    assert {arrays.grad.dtype, arrays.work.dtype, arrays.out.dtype} == {torch.bfloat16}
    assert {arrays.residual.dtype, arrays.left.dtype} == {torch.float32}


def test_a_record_has_its_type_and_a_wrong_result_is_said_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(arrays: Arrays, pattern: str) -> list[Case]:
        wrong = int(arrays.dtype == torch.bfloat16)
        first = Case("triad", 12, lambda: None, lambda: 0)
        return [first, Case("a kernel", arrays.grad_bytes, lambda: None, lambda: wrong)]

    monkeypatch.setattr(kernel_table, "cases", two)
    assert kernels.main(["--count", "100", "--repeat", "1", "--json", str(tmp_path / "all.json")]) == 1
    said = capsys.readouterr()
    assert said.err == "wrong results: a kernel (bfloat16)\n"
    triad, kernel = said.out.splitlines()[-2:]
    assert triad.split()[-4:] == ["-", "-", "-", "0"] and kernel.split()[-1] == "1"
    _, *records = map(json.loads, (tmp_path / "all.json").read_text().splitlines())
    found = [(record["name"], record["dtype"], record["wrong"]) for record in records]
    assert found == [("triad", "float32", 0), ("a kernel", "float32", 0), ("a kernel", "bfloat16", 1)]
