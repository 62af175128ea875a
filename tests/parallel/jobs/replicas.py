"""Replicas of torchft, each a process, and the lighthouse that they agree by, which starts them.

Without arguments this is the lighthouse. Gradients of a linear model on random data; weights move by plain SGD.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import horovod_compress.ddp as hvc
from tests.support.nets import digest

case: dict[str, Any] = json.loads(os.environ["HVC_TEST_ARGUMENTS"])
folder = Path(os.environ["HVC_TEST_FOLDER"])
SECONDS = 150.0
PATIENCE = timedelta(seconds=12)
LOCAL = "127.0.0.1"
#: Of the lighthouse, for those that it has heard of.
JOIN_MILLISECONDS = 3000
#: Numbers of replicas among which what waits may go on.
WORLDS = (1, 2, 3)


def lighthouse() -> None:
    """Start replicas: those of the beginning, and another one once the others have made some steps."""
    server = LighthouseServer(bind="[::]:0", min_replicas=case.get("least", 2), join_timeout_ms=JOIN_MILLISECONDS)
    port = server.address().rpartition(":")[2]
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://{LOCAL}:{port}"}

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(number)], env=environment)

    replicas, end = [start(number) for number in range(case["begin"])], time.monotonic() + SECONDS
    while time.monotonic() < end and any(replica.poll() is None for replica in replicas):
        time.sleep(0.05)
        if "join" in case and len(replicas) == case["begin"] and (folder / f"step.{case['join']}").exists():
            replicas.append(start(len(replicas)))
    os._exit(0)  # without the lighthouse's threads


def residuals(compression: hvc.Compression) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = compression.state_dict()["state"]["residual"]
    return dict(sorted(kept.items()))


class Replica:
    """One replica, and what it does wrong."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(number)  # all begin with the weights of one of them
        self.number, self.model, self.faults = number, nn.Linear(40, 30), dict(case.get(str(number), {}))
        kind = torch.optim.AdamW if case.get("adam") else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.01 if case.get("adam") else 1.0)
        store = TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
        group = hvc.Replicas.group_class(ProcessGroupGloo)(timeout=PATIENCE)
        self.manager = Manager(
            pg=group, min_replica_size=case.get("least", 2), use_async_quorum=False, timeout=PATIENCE,
            load_state_dict=self.load, state_dict=self.state, replica_id=f"replica_{number}", rank=0, world_size=1,
            store_addr=LOCAL, store_port=store.port, hostname=LOCAL,
        )  # fmt: skip
        self.store, self.replicas = store, hvc.Replicas(self.manager, group, self.compression)

    def state(self) -> dict[str, Any]:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return {"model": weights, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def compression(self) -> hvc.Compression:
        made = hvc.Compression.create(case["method"], self.model.named_parameters(), timeout=6.0, verify_every=1)
        made.register(self.model, self.optimizer, **({"warmup_steps": 2} if case.get("adam") else {}))
        return made

    def train(self) -> None:
        while (step := self.manager.current_step()) < case["steps"]:
            self.await_others(step)
            self.replicas.begin()
            step = self.manager.current_step()  # that of the others, where this one has healed
            fault = self.faults.pop(str(step), None)
            self.optimizer.zero_grad()
            note: dict[str, Any] = {"replica": self.number, "step": step}
            with contextlib.suppress(hvc.ExchangeError):
                note["world"] = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
                note["before"] = digest(residuals(self.replicas.compression).values())
            if fault == "dies":
                os._exit(9)
            with self.replicas.reporting():
                generator = torch.Generator().manual_seed(1000 * step + self.number)
                self.model(torch.randn(8, 40, generator=generator)).square().mean().backward()
                note["exchanged"] = digest(residuals(self.replicas.compression).values())
            if fault == "fails":
                self.manager.report_error(RuntimeError("planted"))
            note["committed"] = self.replicas.should_commit()
            if note["committed"]:
                self.optimizer.step()
            with contextlib.suppress(hvc.ExchangeError):
                self.look(note)
            with (folder / f"notes.{self.number}").open("a") as notes:
                notes.write(json.dumps(note) + "\n")
            (folder / f"step.{step}").touch()
        (folder / f"end.{self.number}").write_text(digest(self.model.parameters()))

    def await_others(self, step: int) -> None:
        """Wait before the first step until all of the beginning are there, and before another one for who joins."""
        (folder / f"here.{self.number}").touch()
        expected = case["begin"] + ("join" in case and step > case["join"])
        end = time.monotonic() + SECONDS
        while len([*folder.glob("here.*")]) < expected and time.monotonic() < end:
            time.sleep(0.02)

    def look(self, note: dict[str, Any]) -> None:
        """Note what waits, also as it would count among others; and what a replica that heals would get."""
        waits, world = [*residuals(self.replicas.compression).values()], note["world"]
        note["after"], note["weights"] = digest(waits), digest(self.model.parameters())
        note["carried"] = {str(other): digest([tensor * (other / world) for tensor in waits]) for other in WORLDS}
        note["nothing"] = digest(map(torch.zeros_like, waits))
        note["shown"] = sorted(kind for kind, tensors in self.replicas._shown().get("state", {}).items() if tensors)


if len(sys.argv) > 1:
    Replica(int(sys.argv[1])).train()
    os._exit(0)
lighthouse()
