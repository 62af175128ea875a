"""Train a small task under horovodrun with any compression method, and record it.

    horovodrun -np 2 python examples/train.py --task digits --method marsit --json out.json

`minimal.py` beside this file shows the few lines a user needs; this script adds what
an experiment needs: evaluation, timing, checkpoints, hashes of every rank.
"""

from __future__ import annotations

import math
import os
import time
from argparse import Namespace
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoint
import options
import records
from agree import stop_if_any
from build import Run, build
from progress import Progress
from tasks import Pair


def main() -> None:
    hvd.init()
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    # cuBLAS repeats its results with this setting only, which it reads when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # On a GPU some operations have no deterministic version, such as the backward pass of MaxPool2d.
    torch.use_deterministic_algorithms(True, warn_only=chosen.device == "cuda")
    run = build(chosen)
    try:
        train(run)
        finish(run)
    finally:
        run.compression.close()


def arguments() -> Namespace:
    """Return the command line, or stop every rank with one message."""
    chosen, problem = None, None
    try:
        chosen = options.parse(quiet=hvd.rank() != 0)
    except options.UsageError as error:
        problem = f"{error} (--help lists the arguments)"
    stop_if_any(problem)
    assert chosen is not None
    return chosen


def train(run: Run) -> None:
    """Take the steps, evaluating at the start, now and then, and at the end."""
    chosen = run.chosen
    progress = Progress(chosen.steps, shown=hvd.rank() == 0)
    if chosen.eval_every:
        evaluate(run, progress, done=0)
    for done in range(1, chosen.steps + 1):
        began = time.perf_counter()
        loss = train_step(run)
        run.training_seconds += time.perf_counter() - began
        run.losses.append(loss)
        progress.step(loss)
        if done == chosen.steps and chosen.update_mode and not chosen.save:
            run.optimizer.flush()  # else each rank ends with steps that no other has
        if done == chosen.steps or (chosen.eval_every and done % chosen.eval_every == 0):
            evaluate(run, progress, done)
    progress.close()


def train_step(run: Run) -> float:
    """Take one step and return this rank's loss before it."""
    chosen = run.chosen
    batch = run.task.batch(chosen.seed, run.step, hvd.rank(), hvd.size(), chosen.batch)
    if chosen.lr_schedule == "cosine":
        for group in run.optimizer.param_groups:
            group["lr"] = chosen.lr * cosine(run.step, chosen.steps)
    run.optimizer.zero_grad()
    loss = cross_entropy(run.model, *moved(batch, run.device))
    began = time.perf_counter()
    loss.backward()
    run.optimizer.step()
    if run.device.type == "cuda":
        torch.cuda.synchronize()  # else only the queueing is timed
    run.timings.append(time.perf_counter() - began)
    run.step += 1
    return loss.item()


def moved(pair: Pair, device: torch.device) -> Pair:
    inputs, targets = pair
    return inputs.to(device), targets.to(device)


def cosine(step: int, steps: int) -> float:
    """Return the share of the learning rate: a linear warm-up over a tenth of the steps, then down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def evaluate(run: Run, progress: Progress, done: int) -> None:
    """Measure the held-out data, each rank its share, and add a point to the curve."""
    totals = hvd.allreduce(held_out_totals(run), op=hvd.Sum, name="train.evaluation")
    loss, correct, count, train_loss, train_count = totals.tolist()
    point = {
        "step": run.step,
        "train_loss": train_loss / train_count if train_count else None,
        "loss": loss / count,
        "accuracy": correct / count,
        "seconds": run.training_seconds,
        "bytes_sent": run.compression.stats()["bytes_sent"],
    }
    run.curve.append(point)
    run.losses.clear()
    progress.evaluated(done, f"held-out loss {point['loss']:.4f}  accuracy {point['accuracy']:.4f}")


@torch.no_grad()
def held_out_totals(run: Run) -> Tensor:
    """Return this rank's sums: loss, hits and samples held out, training loss and steps."""
    totals = torch.zeros(5, dtype=torch.float64, device=run.device)
    for share in run.task.held_out(hvd.rank(), hvd.size()):
        inputs, targets = moved(share, run.device)
        scores, wanted = run.model(inputs).flatten(0, -2), targets.flatten()
        totals[0] += F.cross_entropy(scores, wanted, reduction="sum")
        totals[1] += (scores.argmax(dim=1) == wanted).sum()
        totals[2] += len(wanted)
    totals[3], totals[4] = sum(run.losses), len(run.losses)
    return totals.cpu()  # where Horovod can add them up, however it was built


def finish(run: Run) -> None:
    """Save, compare the ranks, and write the record."""
    chosen = run.chosen
    if chosen.save:
        checkpoint.save(chosen.save, run.step, chosen, run.model, run.optimizer, run.compression)
    record = summary(run)
    if hvd.rank() == 0:
        if chosen.json:
            records.write_json(chosen.json, record)
        print(closing_line(record), flush=True)


def summary(run: Run) -> dict[str, Any]:
    """Return the record of the run; every rank takes part."""
    stats = run.compression.stats()
    hashes = hvd.allgather_object(records.parameter_hash(run.model.parameters()), name="train.hash")
    record = {
        "config": configuration(run),
        "curve": run.curve,
        "final": {"metric": run.task.metric, "unit": run.task.unit, **run.curve[-1]},
        "stats": stats,
        "rank_stats": hvd.allgather_object(stats, name="train.stats"),
        "parameter_hashes": hashes,
        "ranks_identical": len(set(hashes)) == 1,
        "step_seconds": records.spread(run.timings),
        "exchange_seconds_per_step": records.exchange_seconds(stats),
        "versions": records.versions(),
        "command": records.command_line(),
    }
    if run.chosen.hash_residuals:
        mine = records.state_hash(run.compression.state_dict())
        record["residual_hashes"] = hvd.allgather_object(mine, name="train.residuals")
    return record


def configuration(run: Run) -> dict[str, Any]:
    ours = vars(run.chosen) | {"world": hvd.size(), "last_step": run.step}
    ours["parameters"] = sum(parameter.numel() for parameter in run.model.parameters())
    ours["cores"] = os.cpu_count()
    return ours | {"data": run.task.describe()}


def closing_line(record: dict[str, Any]) -> str:
    final = record["final"]
    identical = "yes" if record["ranks_identical"] else "NO"
    return f"held-out {final['metric']} {final[final['metric']]:.4f}, ranks identical: {identical}"


if __name__ == "__main__":
    main()
