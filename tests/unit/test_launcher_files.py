"""The scripts and manifests in examples/launchers: what they start is what the launchers and this repository have."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "launchers"
SCRIPTS = ["ddp.sbatch", "horovod.sbatch"]
INSTALLED = "/opt/horovod-compress/"  # where the sources are in our images
#: Options of sbatch, as in its manual page.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output"}
#: Stands for a program of Slurm's, or a launcher: Slurm's do what they do on one node, a launcher writes its arguments.
PROGRAMS = {
    "scontrol": 'test "$1 $2 $3" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
    "srun": 'exec "$@"',
}
_WRITE = """echo "$OMP_NUM_THREADS" > "$(dirname "$0")/threads"
exec "$PYTHON" -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"
"""
PROGRAMS |= {"torchrun": _WRITE, "horovodrun": _WRITE}
JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "17"}


def started(script: str, folder: Path, variables: dict[str, str] | None = None) -> list[str]:
    """Return the arguments of the launcher that a script starts in a job of two nodes."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, **JOB, **(variables or {})}
    command = ["bash", str(FOLDER / script), "train.py", "--epochs", "3"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def of_torchrun(arguments: list[str]) -> argparse.Namespace:
    """Return arguments as torchrun reads them; it ends with an error where it does not know one."""
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(arguments)


def of_horovodrun(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return arguments as horovodrun reads them."""
    pytest.importorskip("horovod")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it imports distutils
        from horovod.runner.launch import parse_args

    monkeypatch.setattr(sys, "argv", ["horovodrun", *arguments])
    return parse_args()


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by their kinds."""
    yaml = pytest.importorskip("yaml")
    found = {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}
    assert all(one["metadata"]["name"] == "train" for one in found.values())
    return found


# ---- Slurm ----


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_sbatch_come_before_the_first_command_and_are_known(script: str) -> None:
    head, *rest = re.split(r"^(?!#)\S.*\n", (FOLDER / script).read_text(), flags=re.MULTILINE)
    options = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", head, re.MULTILINE)
    assert set(options) == SBATCH and len(options) == len(SBATCH) == head.count("#SBATCH")
    assert not any("#SBATCH" in part for part in rest)  # sbatch would not see it


def test_the_script_of_ddp_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    found = of_torchrun(started("ddp.sbatch", tmp_path, {"RANKS_PER_NODE": "3"}))
    assert (found.nnodes, found.nproc_per_node, found.rdzv_id) == ("2", "3", "17")
    assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "n1:29500")
    assert [found.training_script, *found.training_script_args] == ["train.py", "--epochs", "3"]


def test_the_script_of_horovod_starts_ranks_on_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_horovodrun(started("horovod.sbatch", tmp_path, {"RANKS_PER_NODE": "3"}), monkeypatch)
    assert found.num_proc == 6 and found.hosts == "n1:3,n2:3" and found.use_gloo
    assert found.command == ["python", "train.py", "--epochs", "3"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("ranks", "threads"), [("2", "4"), ("8", "1"), ("16", "1")])
def test_ranks_share_the_cores(script: str, ranks: str, threads: str, tmp_path: Path) -> None:
    started(script, tmp_path, {"RANKS_PER_NODE": ranks})
    assert (tmp_path / "threads").read_text().strip() == threads


def test_a_script_that_fails_ends_the_job(tmp_path: Path) -> None:
    started("ddp.sbatch", tmp_path)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **JOB, "SLURM_JOB_NODELIST": "unknown"}
    command = ["bash", str(FOLDER / "ddp.sbatch"), "train.py"]
    assert subprocess.run(command, env=env, capture_output=True, timeout=60, check=False).returncode != 0


# ---- Kubernetes ----


def test_the_indexed_job_is_of_as_many_pods_as_torchrun_waits_for() -> None:
    found = manifests("ddp_job.yaml")
    service, job = found["Service"], found["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    asked = of_torchrun(container["args"])
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == int(asked.nnodes)
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "train"}
    assert pod["subdomain"] == service["metadata"]["name"] and asked.rdzv_endpoint == "train-0.train:29500"
    assert (ROOT / asked.training_script.removeprefix(INSTALLED)).is_file()


def test_the_mpi_job_has_a_slot_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = manifests("horovod_mpijob.yaml")["MPIJob"]["spec"]
    launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    (container,) = launcher["template"]["spec"]["containers"]
    assert container["command"] == ["horovodrun"] and "--hostfile=/etc/mpi/hostfile" in container["args"]
    python = container["args"].index("python")
    arguments = [word for word in container["args"][:python] if not word.startswith("--hostfile=")]
    asked = of_horovodrun([*arguments, *container["args"][python:]], monkeypatch)
    assert asked.num_proc == worker["replicas"] * spec["slotsPerWorker"]
    assert asked.use_gloo and asked.nics == {"eth0"} and launcher["replicas"] == 1
    assert (ROOT / asked.command[1].removeprefix(INSTALLED)).is_file()


@pytest.mark.parametrize("name", ["ddp_job.yaml", "horovod_mpijob.yaml"])
def test_images_are_those_that_the_page_builds(name: str) -> None:
    page = (ROOT / "docs" / "launchers.md").read_text()
    images = set(re.findall(r"image: (\S+)", (FOLDER / name).read_text()))
    assert images and all(f"-t {image} ." in page for image in images)


def test_the_stages_of_these_images_exist() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)", (ROOT / "docker" / "Dockerfile.cpu").read_text(), re.MULTILINE)
    assert "cluster" in stages


# ---- the readers of these tests ----


def test_a_wrong_option_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        of_torchrun(["--nodes=2", "train.py"])
    with pytest.raises(SystemExit):
        of_horovodrun(["--slots=2", "python", "train.py"], monkeypatch)
    assert "error:" in capsys.readouterr().err
