"""`hvd-compress --check-build`: the text, the JSON, and that both are honest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

import horovod_compress.cli
from horovod_compress.cli import check_build, command as cli
from horovod_compress.cli.check_build import Item, Report, Unavailable, attempt

COMPLETE = Report(
    version="1.2.3",
    kernels=[Item("reference", True), Item("CPU", True, "avx2"), Item("CUDA", False, "built, no device found")],
    transports=[Item("local", True), Item("gloo", True), Item("nccl", False, "CuPy is not installed")],
    methods=[Item("marsit", True), Item("topk", True)],
    horovod=[Item("Horovod", True, "0.28.1"), Item("Gloo controller", True), Item("NCCL operations", False, "", False)],
    torch=[Item("PyTorch", True, "2.13.0, CPU only")],
    environment={"HVC_ISA": "avx2"},
    warnings=[check_build.STALL_WARNING],
)


def without(**changes: object) -> Report:
    return Report(**{**vars(COMPLETE), **changes})


def test_text_is_in_the_style_of_horovodrun():
    lines = COMPLETE.as_text().splitlines()
    assert lines[0] == "horovod-compress v1.2.3:"
    assert "Available Kernels:" in lines
    assert "    [X] CPU (avx2)" in lines
    assert "    [ ] CUDA (built, no device found)" in lines
    assert "    [X] marsit" in lines
    assert "    HVC_ISA=avx2" in lines
    assert any(line.startswith("Warning: Horovod's stall check does nothing") for line in lines)
    assert not any(line.startswith("Problem") for line in lines)


def test_json_says_the_same():
    content = json.loads(COMPLETE.as_json())
    assert content["usable"] is True
    assert content["problems"] == []
    assert content["kernels"][1] == {"name": "CPU", "available": True, "detail": "avx2", "needed": True}
    assert content["environment"] == {"HVC_ISA": "avx2"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"methods": [Item("none", False)]}, "no methods"),
        ({"transports": [Item("local", True), Item("gloo", False)]}, "no transport between processes"),
        ({"kernels": [Item("reference", False)]}, "no kernels"),
        ({"horovod": [Item("Horovod", False)]}, "no Horovod"),
        ({"torch": [Item("PyTorch", False)]}, "no PyTorch"),
        ({"host": [Item("name resolves", False)]}, "the name of this host does not resolve"),
    ],
)
def test_what_keeps_a_job_from_running_is_a_problem(changes, problem):
    report = without(**changes)
    (only,) = report.problems()
    assert only.startswith(problem)
    assert f"Problem: {only}" in report.as_text().replace("\n         ", " ")


def test_an_instruction_set_that_is_refused_is_the_one_problem():
    """Nothing else of the package imports then, and to build it again would not help."""
    command = "from horovod_compress.cli.check_build import collect; print(collect({}).as_json())"
    ran = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "HVC_ISA": "avx9"},
        capture_output=True,
        text=True,
        check=True,
    )
    problems = json.loads(ran.stdout)["problems"]
    assert problems[0].startswith("HVC_ISA='avx9', but this processor runs")
    assert not any(problem.startswith(("no kernels", "no transport", "no methods")) for problem in problems)


@pytest.mark.parametrize(("report", "status"), [(COMPLETE, 0), (without(methods=[]), 1)])
def test_exit_status_says_whether_a_job_can_run(monkeypatch, capsys, report, status):
    monkeypatch.setattr(check_build, "collect", lambda environment: report)
    assert cli.main(["--check-build"]) == status
    assert cli.main(["--check-build", "--json"]) == status
    assert capsys.readouterr().out.startswith("horovod-compress v1.2.3:")


def test_attempt_reports_reasons_and_surprises():
    def unavailable() -> str:
        raise Unavailable("no device found")

    def broken() -> str:
        raise OSError("libx.so.1: cannot open shared object file\nand a page more")

    assert attempt("a", lambda: "fine") == Item("a", True, "fine")
    assert attempt("b", unavailable) == Item("b", False, "no device found")
    assert attempt("c", broken) == Item("c", False, "OSError: libx.so.1: cannot open shared object file")


def test_methods_that_do_not_import_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod_compress.codecs.registry", None)
    (item,) = check_build.method_items()
    assert not item.available
    assert "does not import" in item.detail


def test_methods_come_from_the_registry(monkeypatch):
    registry = types.SimpleNamespace(available=lambda: ["marsit", "topk"])
    monkeypatch.setitem(sys.modules, "horovod_compress.codecs", types.ModuleType("codecs"))
    monkeypatch.setitem(sys.modules, "horovod_compress.codecs.registry", registry)
    assert check_build.method_items() == [Item("marsit", True), Item("topk", True)]


def test_this_installation_is_described(monkeypatch):
    monkeypatch.setenv("HVC_TEST_ONLY", "yes")
    monkeypatch.setattr(check_build, "_device_of_torch", no_cuda)
    report = check_build.collect({"HVC_TEST_ONLY": "yes", "HOME": "/nowhere"})
    kernels = {item.name: item for item in report.kernels}
    assert kernels["CPU"].available
    assert kernels["CPU"].detail in ("generic", "avx2", "avx512")
    every = (*report.kernels, *report.transports)
    assert {item.name for item in every if not item.needed} == {"CUDA", "nccl"}  # a job on CPUs runs without them
    assert Item("PyTorch framework", True) in report.horovod
    assert report.torch[0].available
    assert report.environment == {"HVC_TEST_ONLY": "yes"}
    assert report.warnings == [check_build.STALL_WARNING]


@pytest.mark.parametrize("variable", ["HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_a_problem(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is one that is."""
    for name in ("nowhere0", "lo"):
        monkeypatch.setenv(variable, name)
        report = check_build.collect({variable: name})
        assert report.environment == {variable: name} and f"    {variable}={name}\n" in report.as_text()
        (gloo,) = [item for item in report.transports if item.name == "gloo"]
        told = [problem for problem in report.problems() if f"{variable}={name} has no IP address" in problem]
        assert (gloo.available, len(told)) == ((True, 0) if name == "lo" else (False, 1))


def test_what_gpus_lack_is_said_with_its_remedy():
    lacking = ["the CUDA kernels", "CuPy with NCCL"]
    report = without(missing_for_gpus=lacking)
    text = " ".join(report.as_text().split())
    assert (
        "Note: make setup CUDA=1, run in the source folder" in text
        and "also need: the CUDA kernels, CuPy with NCCL." in text
    )
    assert not report.problems()
    assert json.loads(report.as_json())["missing_for_gpus"] == lacking
    assert "make setup CUDA=1 TORCH=" in without(missing_for_gpus=[check_build.CUDA_TORCH]).as_text()
    assert "GPUs" not in COMPLETE.as_text()


def no_cuda() -> str:
    raise Unavailable("CPU only")


@pytest.mark.parametrize("check", ["_cuda_of_torch", "_nccl_library"])
def test_what_gpus_need_is_looked_for(monkeypatch, check):
    monkeypatch.setattr(check_build.importlib.util, "find_spec", lambda name: object())
    for name in ("_cuda_of_torch", "_nccl_library"):
        monkeypatch.setattr(check_build, name, lambda: "found")
    assert check_build.missing_for_gpus() == []
    monkeypatch.setattr(check_build, check, no_cuda)
    assert len(check_build.missing_for_gpus()) == 1
    monkeypatch.setattr(check_build.importlib.util, "find_spec", lambda name: None)
    assert "the CUDA kernels" in check_build.missing_for_gpus()


@pytest.mark.parametrize(
    ("torch", "tensors", "warned"), [("13.0", False, True), ("13.0", True, False), (None, False, False)]
)
def test_horovod_that_does_not_wait_for_gpus_is_warned_of(monkeypatch, torch, tensors, warned):
    monkeypatch.setattr(check_build, "_device_of_torch", lambda: torch or no_cuda())
    found = check_build.horovod_warnings([Item("Horovod", True), Item(check_build.CUDA_TENSORS, tensors, "", False)])
    assert (check_build.HOROVOD_WARNING in found) is warned
    assert check_build.horovod_warnings([Item("Horovod", False)]) == []


def test_verb_is_added_by_adding_a_file(monkeypatch, tmp_path, capsys):
    (tmp_path / "count_bits.py").write_text(
        '"""Counts bits, 100% of them.\n\nAnd explains."""\n'
        "def add_arguments(parser): parser.add_argument('--of', type=int)\n"
        "def run(arguments):\n"
        "    print(arguments.of.bit_count(), arguments.json)\n"
        "    return 3\n"
    )
    monkeypatch.setattr(horovod_compress.cli, "__path__", [str(tmp_path)])
    monkeypatch.setattr(cli, "VERBS", ("count_bits",))
    assert cli.main(["count-bits", "--of", "7"]) == 3
    assert cli.main(["--json", "count-bits", "--of", "7"]) == 3
    assert cli.main(["count-bits", "--of", "7", "--json"]) == 3
    assert capsys.readouterr().out.split() == ["3", "False", "3", "True", "3", "True"]
    assert cli.main([]) == 2
    assert "Counts bits, 100% of them." in capsys.readouterr().err
    sys.modules.pop("horovod_compress.cli.count_bits")


def test_checking_the_build_is_a_command_of_its_own(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--check-build", "list"])
    assert "--check-build is a command of its own" in capsys.readouterr().err


def test_the_reference_kernels_are_found() -> None:
    assert check_build.attempt("reference", check_build._reference).available
