"""Elastic jobs: ranks come, go, and are killed; the compressions of an elastic state go on, and what waits counts on.

A compression that no state has belongs to one run of Horovod, and says so once in the next, instead of failing again.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.faults import JOBS
from tests.support.elastic import HOSTS, ElasticJob, run_elastic
from tests.support.marks import slow

#: Changes of hosts, each after some steps: 3 ranks, then 2, 3 and 4.
AWAY = {"step": 3, "hosts": ["localhost:2"], "world": 2}
BACK = {"step": 5, "hosts": ["localhost:3"], "world": 3}
MORE = {"step": 8, "hosts": ["localhost:4"], "world": 4}
#: Methods whose results and residuals add up to what they were given.
CONSERVE = (
    "none", "onebit", "ef_signsgd", "powersgd", "topk", "randomk", "spardl", "sparse_binary", "stc", "sketch_fusion",
    "onebit_adam",
)  # fmt: skip
OTHERS = (
    "bf16",
    "dgc",
    "global_qsgd",
    "marsit",
    "natural",
    "qsgd",
    "signsgd",
    "signum",
    "terngrad",
    "loco",
    "scalecom",
)
ROUNDING = 1e-5


def of(*methods: str, path: str = "attached", **asked: Any) -> list[dict[str, Any]]:
    return [{"method": method, "path": path} | asked for method in methods]


def check(job: ElasticJob, world: int, trained: Sequence[dict[str, Any]]) -> None:
    """Check that the job has ended well, with equal weights, and that ranks had equal ones after each step."""
    assert job.status == 0 and "Traceback" not in job.output, job.output
    assert "was loaded, with" not in job.output, job.output  # a compression that begins where its optimizer goes on
    assert len(job.ends) == world, (job.ends, job.output)
    for number, asked in enumerate(trained):
        weights = {end["trained"][number]["weights"] for end in job.ends}
        assert len(weights) == 1, (asked, weights, job.output)
        for (step, ranks), found in _weights(job, number).items():
            delay = asked.get("updates", {}).get("communication_delay", 1)
            assert delay > 1 or len(found) == 1, (asked, step, ranks, job.output)


def _weights(job: ElasticJob, number: int) -> dict[tuple[int, int], set[int]]:
    found = defaultdict(set)
    for note in (note for notes in job.steps for note in notes):
        found[note["step"], note["world"]].add(note["weights"][number])
    return found


def apart(job: ElasticJob, number: int) -> float:
    """Return by how much the sums of one model are apart."""
    return max(end["trained"][number]["apart"] for end in job.ends)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("events", [[AWAY], [AWAY, BACK]])
def test_what_waits_counts_on_among_other_ranks(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    """Ranks leave as announced, so that Horovod has the others go on without sync(), and new ones come."""
    steps = events[-1]["step"] + 2
    trained = [*of("topk", "marsit"), *of("topk", path="stock"), *of("topk", path="update")]
    job = run_elastic(tmp_path, JOBS / "resized.py", ["localhost:3"], 200, trained=trained, steps=steps, events=events)
    check(job, events[-1]["world"], trained)
    worlds = {note["step"]: note["world"] for notes in job.steps for note in notes}
    assert [worlds[step] for step in range(1, steps + 1)] == [3, 3, 3, 2, 2, 3, 3][:steps], worlds
    for number in (0, 2, 3):
        assert apart(job, number) < ROUNDING, (number, job.ends)
    assert all(end["trained"][0]["stats"]["residual_norm"] > 1 for end in job.ends), "nothing waited"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "trained",
    slow(
        of(*CONSERVE), of(*CONSERVE, path="stock"), of(*OTHERS), of(*OTHERS, path="stock"),
        of("topk", "onebit", "onebit_adam", sum=True), of("topk", "onebit", path="stock", sum=True),
        of("topk", "none", "onebit", path="update", updates={"communication_delay": 3}),
        [
            *of("marsit", "dgc", optimizer="AdamW"), *of("marsit", path="stock", optimizer="AdamW"),
            *of("marsit", path="update", optimizer="AdamW", updates={"warmup_steps": 2}),
            *of("diloco", path="update", updates={"communication_delay": 2}),
        ],
        [  # second moments that are held when ranks change, tables, and what goes on from the last result
            *of("marsit", optimizer="AdamW", attach={"warmup_steps": 2, "rebuild_every": 5}),
            *of("topk", optimizer="AdamW", attach={"second_moment": "shared", "warmup_steps": 2, "rebuild_every": 5}),
            *of("onebit_adam", optimizer="Adam", attach={"warmup_steps": 2}),
            *of("marsit", path="stock", optimizer="AdamW", options={"total_steps": 16}),
            *of("sketch_fusion", optimizer="AdamW", options={"error_feedback": "sketch", "schedule": "size:25MB"}),
            *of("powersgd", options={"schedule": "layerwise"}),
            *of("gmc"),
        ],
    ),
)  # fmt: skip
def test_every_method_goes_on(tmp_path: Path, trained: list[dict[str, Any]]) -> None:
    events = [AWAY, BACK, MORE]
    job = run_elastic(tmp_path, JOBS / "resized.py", ["localhost:3"], 360, trained=trained, steps=10, events=events)
    check(job, 4, trained)
    for number, asked in enumerate(trained):
        if asked["method"] in CONSERVE and asked.get("optimizer", "SGD") == "SGD":
            assert apart(job, number) < ROUNDING * (10 if asked.get("sum") else 1), (asked, job.ends)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_job_that_begins_with_one_rank_is_as_any_other_and_tells_things_once(tmp_path: Path) -> None:
    more = {"step": 2, "hosts": ["localhost:2"], "world": 2}, {"step": 6, "hosts": ["localhost:3"], "world": 3}
    trained = [
        *of("topk"), *of("topk", path="stock"), *of("topk", path="update"),
        *of("topk", optimizer="RMSprop", given={"centered": True}), *of("marsit", optimizer="AdamW"),
    ]  # fmt: skip
    for asked in trained:
        asked["options"] = {"total_steps": 5}  # the line comes after 4
    job = run_elastic(
        tmp_path, JOBS / "resized.py", ["localhost:1"], 320, trained=trained, steps=9, events=more, log="INFO"
    )
    check(job, 3, trained)
    assert all(apart(job, number) < ROUNDING for number in range(3)), job.ends
    told = {
        "computes its second moment": 1, "the second moment of AdamW is shared": 1, "topk, the first 4 steps": 3,
        "marsit, the first 4 steps": 1, " exchanges: ": 1,
    }  # fmt: skip
    assert {words: job.output.count(words) for words in told} == told, job.output


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("comes_back", [False, True])
def test_one_rank_that_is_left_sends_all_that_waits_and_compresses_nothing(tmp_path: Path, comes_back: bool) -> None:
    """Where another one comes again, both go on in step: with rounds, second moments and tables of one kind."""
    left, again = {"step": 4, "hosts": ["localhost:1"], "world": 1}, {"step": 7, "hosts": ["localhost:2"], "world": 2}
    events, held = [left, again] if comes_back else [left], {"warmup_steps": 2, "rebuild_every": 3}
    trained = [
        *of("topk", "onebit_adam", "powersgd", "sketch_fusion"), *of("topk", path="stock"), *of("topk", path="update"),
        *of("signum", "dgc", "gmc", "loco"), *of("marsit", optimizer="AdamW", attach=held),
        *of("onebit_adam", optimizer="Adam", attach=held), *of("marsit", path="stock", optimizer="AdamW"),
    ]  # fmt: skip
    job = run_elastic(
        tmp_path, JOBS / "resized.py", ["localhost:2"], 200, trained=trained, steps=11 if comes_back else 6,
        events=events,
    )  # fmt: skip
    check(job, 1 + comes_back, trained)
    assert all(apart(job, number) < ROUNDING for number in range(6)), job.ends
    waits = [end["stats"]["residual_norm"] > 0 for end in job.ends[0]["trained"]]
    assert waits[:5] == [comes_back] * 5 and waits[5], "in update mode it waits for others"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", slow(1.0, 2.5))
def test_hosts_change_again_before_a_change_is_over(tmp_path: Path, after: float) -> None:
    twice = {"step": 3, "hosts": ["localhost:2"], "then": ["localhost:1"], "after": after, "world": 1}
    trained = [*of("topk", "spardl"), *of("topk", path="stock"), *of("topk", path="update")]
    job = run_elastic(
        tmp_path, JOBS / "resized.py", ["localhost:3"], 260, trained=trained, steps=7, events=[twice, BACK]
    )
    check(job, 3, trained)
    assert all(apart(job, number) < ROUNDING for number in range(len(trained))), job.ends


@pytest.mark.timeout(200)
@pytest.mark.parametrize("after", slow(0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed(tmp_path: Path, victim: int, after: float) -> None:
    """Whenever it dies: the others go on at a commit, with equal weights, and say what was lost."""
    trained = [
        *of("topk", "marsit"), *of("topk", path="stock"), *of("marsit", optimizer="AdamW"),
        *of("topk", path="update", updates={"communication_delay": 2}),
    ]  # fmt: skip
    hosts = [f"{host}:1" for host in HOSTS[:3]]
    kill = {"step": 5, "kill": f"{HOSTS[victim]}:0", "after": after}
    job = run_elastic(
        tmp_path, JOBS / "resized.py", hosts, 160, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}, trained=trained, steps=12,
        commit_every=2, events=[kill],
    )  # fmt: skip
    check(job, 2, trained)
    first = {notes[0]["rank"]: [note for note in notes if note["world"] == 2] for notes in job.steps}
    assert {notes[0]["step"] % 2 for notes in first.values() if notes} == {1}, "they did not begin at a commit"
    assert "of 3 are gone, and with them residual that was not sent: its norm was" in job.output
    for end in job.ends:
        lost = end["trained"][0]["stats"]["residual_lost"]
        assert math.isfinite(lost) and lost > 1, end


@pytest.mark.timeout(200)
@pytest.mark.parametrize("after", slow(0.0, 0.2, 0.45))
def test_nothing_is_lost_with_a_rank_of_which_there_is_a_copy(tmp_path: Path, after: float) -> None:
    conserve = ("topk", "spardl", "onebit_adam", "sketch_fusion", "powersgd", "onebit")
    trained = [*of(*conserve), *of("topk", path="stock"), *of("topk", path="update"), *of("topk", sum=True)]
    hosts = [f"{host}:1" for host in HOSTS[:3]]
    kill = {"step": 5, "kill": f"{HOSTS[1]}:0", "after": after}
    job = run_elastic(
        tmp_path, JOBS / "resized.py", hosts, 160, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}, trained=trained, steps=8,
        commit_every=2, pause=0.5, copies=True, events=[kill],
    )  # fmt: skip
    check(job, 2, trained)
    assert "are gone" not in job.output
    for number, asked in enumerate(trained):
        assert apart(job, number) < ROUNDING * (10 if asked.get("sum") else 1), (asked, job.ends)
        assert all(end["trained"][number]["stats"]["residual_lost"] == 0 for end in job.ends)


def random_kills(generator: random.Random, world: int) -> list[dict[str, Any]]:
    """Return five deaths at random points: in steps or commits, and two of them in the recovery from the one before.

    Those two ranks are no neighbours of the one before, whose only copy they may hold, or which may hold theirs.
    """
    kills, rank = [], 0
    for when in ("step", "restore", "step", "sync", "step"):
        if when == "step":
            rank, after = generator.randrange(world), generator.uniform(0, 1)
        else:
            rank, after = (rank + generator.randrange(2, world - 1)) % world, generator.uniform(0, 2.5)
            world -= 2
        kills.append({"rank": rank, "when": when, "after": after})
    return kills


def check_begins(job: ElasticJob, every: int) -> None:
    """Check that after each reset all ranks had the weights of the last commit, as the new rank 0 had noted them."""
    begun = defaultdict(list)
    for notes in job.lives:
        known, last = {0: notes[0]["weights"]}, 0
        for note in notes:
            if note["begins"]:
                begun[note["step"], note["world"]].append(tuple(note["weights"]))
                if note["rank"] == 0:  # a death within a commit may be before or after it
                    assert note["step"] % every == 0 and 0 <= last - note["step"] <= every, (note, last)
                    assert note["weights"] == known[note["step"]], (note, known)
            known[note["step"]], last = note["weights"], note["step"]
    assert all(len(set(found)) == 1 for found in begun.values()), begun
    worlds = [world for _, world in begun]  # a recovery may be cut off before all ranks have begun
    assert all(len(found) == world for (_, world), found in begun.items() if world in (max(worlds), min(worlds))), begun


def seconds_to_go_on(job: ElasticJob, killed: float) -> float:
    """Return how long after a death the first rank had made a step among those that were left."""
    found = (
        after["at"]
        for notes in job.lives
        for before, after in pairwise(notes)
        if before["begins"] and before["at"] > killed and not after["begins"]
    )
    return min(found) - killed


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_are_killed_at_random_points(tmp_path: Path, seed: int, copies: bool) -> None:
    """Five of seven ranks, one after the other; the others go on at the last commit, and lose nothing with copies."""
    trained = [
        *of("marsit", "topk", "powersgd"), *of("marsit", "topk", path="stock"),
        *of("topk", path="update", updates={"communication_delay": 2}),
    ]  # fmt: skip
    kills = random_kills(random.Random(2 * seed + copies), len(HOSTS))
    job = run_elastic(
        tmp_path, JOBS / "resized.py", [f"{host}:1" for host in HOSTS], 450, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"},
        trained=trained, steps=10, commit_every=2, copies=copies, kills=kills,
    )  # fmt: skip
    # Gloo's own thread aborts its process if a dying rank's last message is not of the length that it expects.
    aborted = job.output.count("instance of 'gloo::EnforceNotMet'")
    assert aborted <= 1, job.output
    check(job, len(HOSTS) - len(kills) - aborted, trained)
    check_begins(job, 2)
    killed = [float((tmp_path / f"killed.{number}").read_text()) for number in range(len(kills))]
    assert max(seconds_to_go_on(job, at) for at in killed) < 60, (killed, job.lives)
    if copies and aborted:
        return  # that one may have had the only copy of another
    assert copies == ("are gone" not in job.output), job.output
    for number, asked in enumerate(trained):
        for stats in (end["trained"][number]["stats"] for end in job.ends):
            assert (stats["residual_lost"] == 0) if copies else (1 < stats["residual_lost"] < math.inf), stats
        if copies and asked["method"] in CONSERVE:
            assert apart(job, number) < 10 * ROUNDING, (asked, job.ends)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("inside", slow("part", "_add_up", "_connect", "_share", "save"))
def test_a_rank_dies_while_hosts_change(tmp_path: Path, inside: str) -> None:
    """Wherever the others wait for it: they go back to the last commit, and go on without it."""
    hosts = [f"{host}:1" for host in HOSTS[:3]]
    leaves = HOSTS[2] if inside in ("part", "_add_up") else HOSTS[1]  # one that is to leave, or to stay
    fault = {"host": f"{leaves}:0", "inside": inside, "step": 3}
    away = {"step": 3, "hosts": hosts[:2]}
    trained = [*of("topk", "marsit"), *of("topk", path="stock"), *of("topk", path="update")]
    job = run_elastic(
        tmp_path, JOBS / "resized.py", hosts, 160, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}, trained=trained, steps=20,
        pause=0.3, events=[away], fault=fault,
    )  # fmt: skip
    assert list(tmp_path.glob("killed.*")), job.output
    check(job, 1 if leaves == HOSTS[1] and inside != "save" else len(job.ends), trained)


# ---- loading -------------------------------------------------------------------------------------

LATE = 150.0  # far longer than what is told at once takes


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("where", ["inside", "top", "before a start", "before an update optimizer"])
def test_a_rank_that_joins_and_loads_alone_is_told_at_once(tmp_path: Path, where: str) -> None:
    """It ends, and the others go on without it. The control loads where all ranks do, and only at the beginning."""
    hosts = [f"{host}:1" for host in HOSTS[:3]]
    job = run_elastic(tmp_path, JOBS / "elastic_load.py", hosts[:2], 180.0, where=where, then=hosts, timeout=LATE)
    assert job.status == 0 and len(job.ends) == (3 if where == "inside" else 2), job.output
    took = max(end["at"] for end in job.ends) - max(began.stat().st_mtime for began in tmp_path.glob("began.*"))
    assert took < 0.6 * LATE and not list(tmp_path.glob("loaded.*")), job.output
    words = "rank(s) 2 to the loading of a checkpoint folder"
    assert (words in job.output) == ("MismatchError" in job.output) == (where != "inside"), job.output


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("before", ["commit", "step"])
@pytest.mark.parametrize("on", ["rank 0", "all"])
def test_a_rank_that_saves_alone_ends_the_job(tmp_path: Path, before: str, on: str) -> None:
    """It would do so again after a reset. The control saves on all ranks."""
    hosts = [f"{host}:1" for host in HOSTS[:2]]
    job = run_elastic(tmp_path, JOBS / "elastic_save.py", hosts, 150.0, before=before, on=on)
    told = [path.read_text() for path in tmp_path.glob("told.*")]
    if on == "all":
        assert job.status == 0 and len(job.ends) == 2 and not told, job.output
        return
    assert job.status and not job.ends and told, job.output
    other = "commit or part" if before == "commit" else "rank(s) 1 to the exchange of step 5"
    assert all("rank(s) 0 to the saving of a checkpoint" in text and other in text for text in told), told


# ---- a compression that no state has -------------------------------------------------------------


def run(folder: Path, path: str, anew: bool) -> tuple[ElasticJob, list[list[str]]]:
    """Run the job; return it, and what each process has tried: numbers of ranks."""
    hosts = [f"{HOSTS[0]}:1", f"{HOSTS[1]}:2"]
    job = run_elastic(folder, JOBS / "elastic.py", hosts, 120.0, path=path, anew=anew)
    return job, [p.read_text().split() for p in folder.glob("tries.*")]


@pytest.mark.parametrize("path", slow("attached", "stock", "update"))
def test_a_compression_of_another_run_is_refused_once(tmp_path: Path, path: str) -> None:
    job, tries = run(tmp_path, path, anew=False)
    assert job.status != 0
    assert "ConfigError" in job.output and "let its state have the compression" in job.output, job.output
    assert max(len(mine) for mine in tries) == 2, tries  # with three ranks, and once more with the one that is left


@pytest.mark.parametrize("path", slow("attached"))
def test_a_compression_made_anew_goes_on(tmp_path: Path, path: str) -> None:
    """The control: one that is created inside the function of ``hvd.elastic.run``."""
    job, tries = run(tmp_path, path, anew=True)
    assert ["3", "1"] in tries, job.output
    assert list(tmp_path.glob("done.*")), job.output
