"""`hvd-compress headroom` and `hvd-compress bench` in one process: what they conclude, print and refuse."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_compress.cli import bench, command as cli, headroom
from horovod_compress.cli.plan import parse
from tests.support.marks import slow

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
    ("milliseconds", "said"),
    [
        (
            (100, 110, 120, 105),
            "does not pay here: horovod fp32 takes 100.0 ms, marsit 105.0 ms. Train without compression.",
        ),
        (
            (100, 97, 120, 96),
            "gains less than 5% here: horovod fp32 takes 100.0 ms, marsit 96.0 ms. Train without compression.",
        ),
        (
            (200, 80, 120, 90),
            "does not pay here: horovod fp16 takes 80.0 ms, marsit 90.0 ms. Horovod's own fp16 is the best of these",
        ),
        (
            (200, 190, 80, 90),
            "does not pay here: none takes 80.0 ms, marsit 90.0 ms. Method none, which does not compress, is the best",
        ),
    ],
)
def test_what_the_transport_does_is_not_the_merit_of_compression(
    milliseconds: tuple[float, float, float, float], said: str
) -> None:
    document = found(*milliseconds)
    assert not document["pays"]
    assert f"marsit {said}" in headroom.text(document)


def test_the_gain_of_a_step_is_shorter_or_longer_and_never_negative() -> None:
    shorter, longer = found(100, 100, 100, 50, compute_ms=100), found(100, 100, 100, 120, compute_ms=100)
    assert shorter["step_gain"] == pytest.approx(0.25) and shorter["most_step_gain"] == pytest.approx(0.5)
    assert "a step gets 25% shorter than with horovod fp32" in headroom.text(shorter)
    assert "a step gets 10% longer than with horovod fp32" in headroom.text(longer)
    assert "-" not in headroom.text(longer).splitlines()[-1]
    assert "step_gain" not in found(100, 100, 100, 50)


def test_a_method_that_does_not_pay_is_compared_with_one_rival() -> None:
    """float16 is 2 % faster here: too little to be advised."""
    document = found(100, 98, 120, 120, compute_ms=100)
    assert (document["against"], document["advice"]) == ("horovod fp16", "horovod fp32")
    assert document["step_gain"] == pytest.approx(-0.1)
    assert "horovod fp16" not in "".join(headroom.text(document).splitlines()[-2:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elements", "0"], "--elements should be a whole number from 1 to 2147483647, got 0"),
        (["--elements", str(1 << 31)], "--elements should be"),
        (["--repeat", "1"], "--repeat should be at least 2, got 1"),
        (["--compute-ms", "-1"], "--compute-ms should be a number above 0, at most 1,000,000,000, got -1"),
        (["--compute-ms", "0"], "--compute-ms should be"),
        (["--compute-ms", "nan"], "--compute-ms should be"),
        (["--compute-ms", "inf"], "--compute-ms should be"),
        (["--method", "nothing"], "unknown method 'nothing'; choose one of: "),
    ],
)
def test_wrong_arguments_are_refused_before_horovod_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["headroom", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "start"), [("horovodrun", "horovodrun -np 4"), *slow(("torchrun", "torchrun --nnodes 4"))]
)
def test_one_rank_has_nobody_to_exchange_with(launcher: str, start: str) -> None:
    if launcher == "horovodrun":
        pytest.importorskip("horovod.torch")
    words = [sys.executable, "-m", "horovod_compress.cli", "headroom", "--launcher", launcher]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    done = subprocess.run(words, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "no one to exchange with" in done.stderr and start in done.stderr


# ---- bench ------------------------------------------------------------------------------------

TINY = ["kernels", "--count", "2048", "--repeat", "1", "--filter", "crc32c"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the verb see no source around the package."""
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "horovod_compress" / "cli" / "bench.py"))


@pytest.mark.usefixtures("installed")
def test_without_the_source_other_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "allreduce"]) == 2
    assert "not part of an installed package" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_an_installed_package_times_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", "--count", "5000", "--repeat", "1", "--json"]) == 0
    first, *records = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["count"] == 5000 and len(records) >= 5
    assert all(record["wrong"] == 0 and record["bytes_per_second"] > 0 for record in records)
    assert cli.main(["bench", "kernels", "--count", "100", "--repeat", "2"]) == 0
    assert "sign_offer" in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_kernel_of_an_installed_package_that_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from horovod_compress import ops
    from horovod_compress.ops import legality

    real = ops.sign_pack

    def wrong(grad: Any, bits: Any) -> None:
        real(grad, bits)
        bits[3] ^= legality.REFERENCE is None

    monkeypatch.setattr(ops, "sign_pack", wrong)
    assert cli.main(["bench", "kernels", "--count", "5000", "--repeat", "1"]) == 1
    assert "wrong results: sign_pack" in capsys.readouterr().err


def test_a_kernel_that_there_is_not_is_told_of_before_arrays_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert cli.main(["bench", "kernels", "--filter", "no such", "--count", str(10**12)]) == 2
    assert "no case has 'no such' in its name" in capsys.readouterr().err


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
    with pytest.raises(SystemExit):
        cli.main(["bench"])
    missing = "hvd-compress bench: error: the following arguments are required: {kernels,allreduce,training}"
    assert capsys.readouterr().err.splitlines()[-1] == missing


@pytest.mark.parametrize(("words", "program"), [(["list"], "hvd-compress list"), ([], "hvd-compress")])
def test_an_unknown_argument_shows_the_usage_of_its_verb(
    words: list[str], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--wrong"])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith(f"usage: {program} [-h]")
    assert said.endswith(f"{program}: error: unrecognized arguments: --wrong\n")


@pytest.mark.parametrize("level", ["kernels", "allreduce", "training step", "training accuracy"])
def test_a_benchmark_has_the_name_that_the_user_started(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("psutil")
    with pytest.raises(SystemExit):
        cli.main(["bench", *level.split(), "--elements", "0"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: hvd-compress bench {level} ") and "python -m" not in said
    assert said.endswith(f"hvd-compress bench {level}: error: unrecognized arguments: --elements 0\n")


def test_a_kind_of_training_is_asked_for_by_the_name_that_the_user_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "training"]) == 2
    assert capsys.readouterr().err.startswith("hvd-compress bench training takes step or accuracy first")


@pytest.mark.parametrize("bench", [["allreduce"], ["training", "step"], ["training", "accuracy"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "nope"], "unknown contestant 'nope'"),
        (["--methods", "topk bits=3"], "topk has no option 'bits'"),
        (["--methods", "none bits=3"], "none has no option 'bits'; it has no specific options"),
        (["--methods", "topk density=7"], "density should be a number above 0"),
        (["--methods", "topk schedule=nope"], "schedule should be a Plan or one of"),
        (["--methods", "topk exchange=ring"], "topk can be exchanged by gather only"),
        (["--methods", "none,none"], "names are unique"),
        (["--ranks", "1"], "--ranks"),
        (["--delay", "5ms"], "only the lab can limit or delay links"),
        (["--where", "lab", "--delay", "nope"], "a delay is a number and us, ms or s"),
        (["--where", "lab", "--hosts", "a:1"], "leave --hosts out"),
        (["--json", "/"], "--json takes a file to append to, / is a folder"),
        (["--plot", "/dev/null"], "--plot takes a folder, /dev/null is a file"),
        (["--from", "/missing"], "/missing: No such file"),
        (["--from", "/"], "/: Is a directory"),
        (["--from", "/dev/null"], "/dev/null should hold the records of a benchmark"),
    ],
)
def test_a_benchmark_is_refused_before_it_starts(
    bench: list[str], words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psutil")
    from benchmarks import accuracy, allreduce, step

    for module in (accuracy, allreduce, step):
        monkeypatch.setattr(module, "open_launcher", lambda *given: pytest.fail("a job is started"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["--json", "bench", *bench, *words] if words[0] != "--json" else ["bench", *bench, *words])
    said_of = capsys.readouterr()
    assert caught.value.code == 2 and said in said_of.err and not said_of.out


def test_json_may_come_last_but_not_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY, "--json"]) == 0
    assert all(json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert cli.main(["--json", "bench", *TINY, "--json", "records.json"]) == 2
    assert "choose one" in capsys.readouterr().err


# ---- list -------------------------------------------------------------------------------------


def test_list_has_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    from horovod_compress.codecs import registry

    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in shown if line} >= set(registry.methods())
    assert cli.main(["list", "--json"]) == 0
    methods = {one["method"]: one for one in reversed(json.loads(capsys.readouterr().out)["methods"])}
    assert set(methods) == set(registry.methods())
    assert methods["none"]["bits"] == 32 and methods["none"]["kept_bytes"] == 0 and methods["none"]["unbiased"]
    assert 1.3 <= methods["marsit"]["bits"] < 1.4 and methods["marsit"]["kept_bytes"] == 4
    assert 0.08 < methods["sparse_binary"]["bits"] < 0.1 and methods["sparse_binary"]["collectives"] == ["gather"]
    assert methods["sketch_fusion"]["conserves"] and not methods["sketch_fusion"]["unbiased"]


def test_list_shows_choices_of_a_user_in_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from horovod_compress.codecs import registry
    from horovod_compress.known import OPTIONS
    from horovod_compress.options import PRESETS

    assert cli.main(["list"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    assert cli.main(["list", "--json"]) == 0
    rows = [one for one in json.loads(capsys.readouterr().out)["methods"] if one["options"]]
    several = [one["options"] for one in rows if len(one["options"]) > 1]
    assert several == [dict(preset.options) for preset in PRESETS.values() if preset.options in several]
    for one in (one for one in rows if len(one["options"]) == 1):  # one word or flag, that changes what is shown
        ((name, value),) = one["options"].items()
        values = OPTIONS[one["method"]][name]
        assert values is not None and value in values
    assert {"merge": "sampled"} in [one["options"] for one in rows if one["method"] == "marsit"]
    assert len(rows) < 2 * len(registry.methods())


def test_list_as_markdown_has_wire_ids_options_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--markdown"]) == 0
    rows = {line.split("`")[1]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert "`0x380f`, 3" in rows["marsit"] and "arXiv:2204.06787" in rows["marsit"]
    assert 'fold; gather with `coding="elias"`' in rows["qsgd"] and '`coding="packed"`' in rows["qsgd"]
    assert cli.main(["list", "--markdown", "--json"]) == 2
    assert "not both" in capsys.readouterr().err


# ---- plan -------------------------------------------------------------------------------------

GIVEN = """
import torch

def net():
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5))
    model[0].bias.requires_grad_(False)
    model[0].register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 30)))
    return model

def waves():
    return torch.nn.ParameterDict({"wave": torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))})

def pairs():
    return [("a", torch.zeros(30, 20)), ("b", (7,)), ("c", [40, 30], 5)]

def one_pair():
    return [("a", (3, 4)), ("a", (3, 4))]

def macs():
    return [("a", (3, 4), -5)]

def lazy():
    return torch.nn.Sequential(torch.nn.LazyLinear(3))

def number():
    return 7

def nothing():
    return []

def broken():
    raise KeyError("layers")
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module with models of a user."""
    (tmp_path / "models_of_a_user.py").write_text(GIVEN)
    (tmp_path / "broken_of_a_user.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "models_of_a_user"
    sys.modules.pop("models_of_a_user", None)


PLAN = ["plan", "--model", "mlp", "--compute-ms", "30"]


def test_plan_says_which_buckets_are_best(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert cli.main([*PLAN, "--method", "topk", "--option", "density=0.02", "--rate", "100mbit"]) == 0
    said = capsys.readouterr()
    assert "mlp (10,512,394 parameters in 8 tensors), 4 ranks, 100 Mbit/s, latency 0.1 ms" in said.out
    for words in ("topk density=0.02", "layerfusion", "layerwise", "single", "size:25MB", "none (float32)", "T1/TN"):
        assert words in said.out
    assert "topk density=0.02 pays here" in said.out and "measuring the codec of topk" in said.err


def test_plan_prints_one_document_and_saves_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from horovod_compress.schedule.plan import Plan

    assert cli.main(["--json", *PLAN, "--method", "marsit", "--save", str(tmp_path / "plan.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bench"] == "plan" and found["ranks"] == 4 and found["model"] == "mlp"
    assert [one["schedule"] for one in found["timelines"]] == ["layerfusion", "layerwise", "single", "size:25MB"]
    assert sum(bucket["elements"] for bucket in found["buckets"]) == found["parameters"] == 10_512_394
    assert Plan.load(tmp_path / "plan.json") == Plan.from_document(found["plan"])


@pytest.mark.parametrize(
    ("given", "named"),
    [("topk,sbc,sparse_binary,topk", ["topk", "sbc"]), ("topk, scalecom", ["topk", "scalecom"])],
)
def test_plan_names_a_method_once(given: str, named: list[str]) -> None:
    """A preset may be another name for a method."""
    assert parse.names(given) == named


def test_plan_takes_a_torus_with_a_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", *PLAN, "--method", "none", "--exchange", "torus:2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {bucket["collective"] for bucket in found["buckets"]} == {"torus:2"}


@pytest.mark.parametrize("exchange", ["ring:2", "torus:x", "torus:0", "gather"])
def test_plan_refuses_what_is_no_exchange(exchange: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--method", "none", "--exchange", exchange]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hvd-compress plan: exchange should be one of") and error.count("\n") == 1


def test_plan_predicts_a_hierarchy_by_the_ranks_of_a_host_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--method", "none", "--exchange", "hierarchical"]) == 2
    assert "--per-host N" in capsys.readouterr().err


def test_plan_for_several_worlds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "worlds.png"
    words = ["--method", "topk,global_qsgd", "--ranks", "8,512", "--per-host", "8", "--plot", str(picture)]
    assert cli.main([*PLAN, *words]) == 0
    said = capsys.readouterr().out
    assert "8 ranks" in said and "cannot: global_qsgd on 512 ranks" in said
    assert any(line.startswith("512 ranks: ") and "hierarchical (" in line for line in said.splitlines())
    assert "each, all at the same rate.\n" in said and "none, hierarchical" in said and picture.stat().st_size > 10_000
    assert cli.main([*PLAN, *words[:4], "--json"]) == 0
    assert {one["method"] for one in json.loads(capsys.readouterr().out)["worlds"]} == {"topk", "global_qsgd", "none"}


@pytest.mark.parametrize(
    ("function", "elements", "tensors"), [("net", 30 * 40 + 40 * 5 + 5, 3), ("pairs", 600 + 7 + 1200, 3)]
)
def test_plan_takes_models_of_a_user(
    given: str, function: str, elements: int, tensors: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--json", "--model", f"{given}:{function}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["tensors"]) == (elements, tensors)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{given}:broken", "raised KeyError: 'layers'"),
        ("{given}:missing", "has no function 'missing'"),
        ("{given}:torch", "has no function 'torch'"),
        ("{given}:number", "should return a torch.nn.Module, or (name, tensor or shape) pairs"),
        ("{given}:nothing", "returned no parameter"),
        ("{given}:one_pair", "two parameters with the same name"),
        ("nowhere:net", "importing 'nowhere' raised ModuleNotFoundError"),
        ("broken_of_a_user:net", "importing 'broken_of_a_user' raised ModuleNotFoundError"),
        (":net", "importing '' raised"),
        ("{given}:macs", "got the entry ('a', (3, 4), -5)"),
        ("{given}:waves", "parameter wave is complex64; supported are float32, float64, float16, bfloat16"),
        ("{given}:lazy", "parameter 0.weight has no shape yet, as in LazyLinear; run a forward pass before returning"),
        ("alexnet", "known models: bert_base, gpt2, mlp, resnet50, vgg16"),
        ("missing.csv", "no table missing.csv"),
    ],
)
def test_plan_refuses_what_is_no_model(given: str, model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", model.format(given=given)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("hvd-compress plan: ") and error.count("\n") == 1


HEADER = b"name,shape,macs\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (HEADER + b"a,4x3,1\nb,-4x3,1\n", ", line 3: a shape is whole numbers above 0, such as 64x3x7x7, got '-4x3'"),
        (b"# model\n\n" + HEADER + b"# layer\na,0x3,1\n", ", line 5: a shape is whole numbers above 0"),
        (HEADER + b"a,4y3,1\n", "got '4y3'"),
        (HEADER + b"a,,1\n", "got ''"),
        (HEADER + b"a,4x3,-1\n", "macs, the multiply-adds of a layer, is a whole number, 0 or more, got '-1'"),
        (HEADER + b"a,4x3,1.5\n", "got '1.5'"),
        (HEADER + b"a,4x3," + b"9" * 30 + b"\n", "macs, the multiply-adds"),
        (HEADER + b"a,4x3\n", ", line 2: a line should have as many values"),
        (HEADER + b"a,4x3,1,1\n", ", line 2: a line should have as many values"),
        (HEADER + b'"a,4x3,1\n', ", line 2: a line should have as many values"),
        (HEADER + b",4x3,1\n", ", line 2: the tensor has no name"),
        (HEADER + b"a,4x3,1\na,4x3,1\n", ", line 3: a second tensor is named 'a'"),
        (HEADER + b"a" * 200_000 + b",4x3,1\n", "is not a CSV file: field larger than field limit"),
        (HEADER, "names no tensor; the first line should be name,shape,macs"),
        (b"", "has no column name: the file is empty; the first line should be"),
        (b"name,shape\na,4x3\n", "has no column macs: the first line is 'name,shape'; the first line should be"),
        (b"name;shape;macs\na;4x3;1\n", "has no column name: the first line is 'name;shape;macs'"),
        (b"\xff\xfe\x00", "should be a CSV file in UTF-8, and is not"),
    ],
)
def test_plan_refuses_a_bad_table(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.csv"
    path.write_bytes(content)
    assert cli.main(["plan", "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hvd-compress plan: {path}") and said in error and error.count("\n") == 1
    assert "module:function" not in error  # a file was given


def test_plan_refuses_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.csv").mkdir()
    assert cli.main(["plan", "--model", str(tmp_path / "model.csv")]) == 2
    assert "model.csv is a folder" in capsys.readouterr().err


def test_a_table_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    from horovod_compress.cli.plan import models

    path = tmp_path / "model.csv"
    path.write_bytes(b"\xef\xbb\xbfname,shape,macs,note\r\na, 4x3 ,1,first\r\n")
    assert models.load(str(path)).tensors == (models.TensorShape("a", (4, 3), 1),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "nothing"], "unknown method 'nothing'"),
        (["--method", ","], "--method takes"),
        (["--method", "topk,diloco"], "diloco takes local steps"),
        (["--model", "resnet"], "no model 'resnet' (did you mean 'resnet50'?); known models: "),
        (["--option", "speed=3"], "topk has no option 'speed'"),
        (["--option", "density"], "--option takes name=value"),
        (["--option", "density=7"], "density should be a number above 0"),
        (["--method", "topk,none", "--option", "density=0.1"], "--option needs exactly one method"),
        (["--ranks", "1"], "--ranks takes numbers from 2"),
        (["--ranks", "four"], "--ranks takes numbers from 2"),
        (["--rate", "fast"], "a rate is a number and kbit, mbit or gbit"),
        (["--latency", "5"], "a latency is a number and us, ms or s"),
        (["--rate", "99999999gbit"], "from 1kbit to 1000000gbit; got '99999999gbit'"),
        (["--latency", "9999s"], "at most 1000s; got '9999s'"),
        (["--compute-ms", "0"], "--compute-ms should be a number from 0.001 to 1,000,000,000, got 0"),
        (["--compute-ms", "1e300"], "--compute-ms should be a number from 0.001 to 1,000,000,000, got 1e+300"),
        (["--cores", "nan"], "--cores should be a number from 0.001 to 1,000,000, got nan"),
        (["--repeat", "1"], "--repeat should be at least 2, got 1"),
        (["--per-host", "1"], "--per-host should be from 2 to 32768, got 1"),
        (["--per-host", "4", "--ranks", "6"], "--per-host 4 needs --ranks with several full hosts, such as 8; got 6"),
        (["--local-rate", "x"], "a rate is a number and kbit, mbit or gbit"),
        (
            ["--local-rate", "1gbit"],
            "--local-rate is the rate of copies in a host's memory; give --per-host N too, or leave it out",
        ),
        (["--option", "density=0.1", "--option", "density=0.2"], "--option density is given twice"),
        (["--option", "timeout=3"], "timeout is common to all methods: give it to the compression as a whole"),
        (["--method", "none", "--option", "bits=3"], "none has no option 'bits'; it has no specific options"),
        (["--plot", ""], "--plot takes a folder, or a file"),
        (["--plot", "/dev/null"], "--plot /dev/null is a file"),
        (["--plot", "/dev/null/x"], "--plot /dev/null/x: No such folder: /dev/null; create it first"),
        (["--plot", "missing/folder"], "--plot missing/folder: No such folder: missing; create it first"),
        (["--plot", "missing/plan.png"], "--plot missing/plan.png: No such folder: missing; create it first"),
        (["--save", ""], "--save takes a file to write, got no name"),
        (["--save", "/"], "--save takes a file to write, got the folder /"),
        (["--per-host", "2", "--measure"], "--per-host applies to predictions only"),
        (["--plot", "picture.gif"], "ends in .png or .svg"),
        (
            ["--save", "missing/folder/plan.json"],
            "missing/folder/plan.json: No such folder: missing/folder; create it first",
        ),
        (["--method", "all", "--save", "plan.json"], "--save needs exactly one method"),
        (["--method", "all", "--measure"], "--measure takes one method"),
        (["--method", "global_qsgd", "--ranks", "4096"], "choose bits=16"),
        (["--exchange", "ring"], 'topk can be exchanged by gather only, got exchange="ring"'),
        (["--method", "none", "--exchange", "torus:3"], "asks for 3 rows of equal length, which 4 ranks cannot form"),
    ],
)
def test_plan_refuses_what_makes_no_sense(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert cli.main([*PLAN, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("hvd-compress plan: ") and error.count("\n") == 1  # nothing was measured


def test_plan_measures_nothing_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To Horovod, each of its ranks would be alone."""
    pytest.importorskip("torch")
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*PLAN, "--measure"]) == 2
    assert "--measure needs Horovod's ranks: start it with horovodrun" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_job_only_codecs_are_measured() -> None:
    pytest.importorskip("horovod.torch")
    words = [sys.executable, "-m", "horovod_compress.cli", *PLAN, "--measure"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    done = subprocess.run(words, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "layerfusion" in done.stdout
    assert "only the codec was measured, not the network" in done.stderr and "horovodrun -np 4" in done.stderr
