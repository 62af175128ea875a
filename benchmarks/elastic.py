r"""Learning in elastic jobs: four ranks, three after a third of the steps, and four again after two thirds.

    python benchmarks/elastic.py --keep elastic.jsonl

Each run trains examples/elastic_horovod.py under a real `horovodrun` with a host-discovery script; the first is what
the others are compared with. A run is `METHOD [option=value ...] [--train's-options ...]`; with `--lose-residuals`,
what waits is lost at each change. A training that has a line in `--keep FILE` is not done again. Each run leaves a JSON
line. Take another file after a change of the package.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.horovodrun import Job, JobFailed, run  # noqa: E402
from benchmarks.quality import compared, read  # noqa: E402

SCRIPT = ROOT / "examples" / "elastic_horovod.py"
MOST, LEAST = 4, 3
WORLDS = [MOST, LEAST, MOST]
DEFAULT_RUNS = ["none", "marsit", "marsit --lose-residuals"]


@dataclass(frozen=True)
class _ElasticJob(Job):
    """One elastic horovodrun.

    Attributes:
        discovery: the script that says which hosts there are.
    """

    discovery: Path = Path()

    def command(self) -> list[str]:
        horovodrun = Path(sys.executable).with_name("horovodrun")
        start = [sys.executable, str(horovodrun), "--gloo", "-np", str(self.ranks), "--min-np", "1"]
        start += ["--network-interface", "lo", "--host-discovery-script", str(self.discovery)]
        return [*start, sys.executable, str(SCRIPT), *self.arguments]


def main() -> None:
    chosen = arguments()
    first = None
    for words in chosen.run or DEFAULT_RUNS:
        try:
            found = trained(words, chosen)
        except JobFailed as failure:
            sys.exit(f"elastic.py: {failure}")
        first = first or found
        against = {"against_first": compared(found["loss"], first["loss"], chosen.task)}
        print(json.dumps({"bench": "elastic"} | found | against), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("text", "lstm"), default="text")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--run", action="append", metavar="'METHOD [option=value ...]'")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one training")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "elastic")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="JSON lines of trainings that need not be repeated")
    return parser.parse_args()


def trained(words: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what one training came to, from the file that keeps it if it is there."""
    asked = {name: getattr(chosen, name) for name in ("task", "steps", "seed", "lr")} | {"name": words}
    for kept in read(chosen.keep):
        if asked.items() <= kept.items():
            return kept
    found = asked | train(words.split(), chosen)
    if chosen.keep:
        chosen.keep.parent.mkdir(parents=True, exist_ok=True)
        with chosen.keep.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return found


def train(words: list[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """Train once, with real ranks that come and go."""
    method, *options = words
    folder = chosen.out / "-".join([*words, str(chosen.seed), str(chosen.steps)])
    folder.mkdir(parents=True, exist_ok=True)
    hosts, discovery, record = folder / "hosts", folder / "hosts.sh", folder / "record.json"
    hosts.write_text(f"localhost:{MOST}\n")
    discovery.write_text(f"#!/bin/sh\ncat '{hosts.resolve()}'\n")
    discovery.chmod(0o700)
    record.unlink(missing_ok=True)
    command = ["--task", chosen.task, "--method", method, "--steps", str(chosen.steps), "--seed", str(chosen.seed)]
    command += ["--lr", str(chosen.lr), "--hosts", str(hosts.resolve()), "--json", str(record.resolve())]
    for step, ranks in ((chosen.steps // 3, LEAST), (chosen.steps * 2 // 3, MOST)):
        command += ["--change", f"{step}:localhost:{ranks}"]
    for option in options:
        command += [option] if option.startswith("--") else ["--option", option]
    job = _ElasticJob(" ".join(words), MOST, command, folder / "log", chosen.limit, discovery=discovery.resolve())
    try:
        run(job, lambda text: None)
    except JobFailed:
        if not record.exists():  # else only ranks that were removed have ended in Horovod's way, by an abort
            raise
    found: dict[str, Any] = json.loads(record.read_text())
    check(found, job)
    return found


def check(found: dict[str, Any], job: Job) -> None:
    """Refuse the record of a training in which ranks did not come and go as asked, or differ at the end.

    Raises:
        JobFailed: it is one.
    """
    if found["worlds"] != WORLDS:
        told = ", then ".join(map(str, found["worlds"]))
        raise JobFailed(f"{job.name}: trained on {told} ranks, expected {WORLDS}; log: {job.log}")
    if not found["ranks_identical"]:
        raise JobFailed(f"{job.name}: ranks ended with different weights; log: {job.log}")


if __name__ == "__main__":
    main()
