"""Somebody who does not belong to the job knocks at every port that it opens, while it connects and while it trains."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import psutil
import torch

import horovod_compress.torch as hvc
from tests.support.rank import arguments, check
from tests.support.training import digest, loss_of, net

case = arguments()
hvd.init()
torch.set_num_threads(1)


def listeners() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="tcp")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def silence(address: tuple[str, int]) -> list[socket.socket]:
    return [socket.create_connection(address, 0.3)]


def many(address: tuple[str, int]) -> list[socket.socket]:
    return [socket.create_connection(address, 0.3) for _ in range(case["connections"])]


def says(data: bytes) -> Callable[[tuple[str, int]], list[socket.socket]]:
    def attack(address: tuple[str, int]) -> list[socket.socket]:
        one = socket.create_connection(address, 0.3)
        one.sendall(data)
        return [one]

    return attack


a_handshake = says(bytes(8))
ATTACKS = {
    "silence": silence,
    "many": many,
    "garbage": says(os.urandom(5000)),
    "half a handshake": says(b"\0\0\0"),
    "a handshake": a_handshake,
    "http": says(b"GET / HTTP/1.1\r\n\r\n"),
}


class Stray:
    """Connects to what listens in this process and did not before."""

    def __init__(self, attack: Callable[[tuple[str, int]], list[socket.socket]]) -> None:
        self.attack, self.known, self.met = attack, listeners(), set[tuple[str, int]]()
        self.connected, self.late = False, set[tuple[str, int]]()  # whether the ranks are; where one got in then
        self.held: list[socket.socket] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        while not self.over.is_set():
            for address in listeners() - self.known:
                late = self.connected
                if self.attack is a_handshake and not late:
                    continue  # the number of a connection that is waited for: the start fails
                self.met.add(address)
                try:
                    self.held += self.attack(address)
                except OSError:
                    continue  # it was closed in between, or lets nobody in
                if late:
                    self.late.add(address)
            del self.held[: -3 * case["connections"]]
            time.sleep(0.001)


def play(attack: Callable[[tuple[str, int]], list[socket.socket]] | None) -> dict[str, Any]:
    stray = Stray(attack or (lambda address: []))
    stray.thread.start()
    model = net()
    named = list(model.named_parameters())
    began = time.monotonic()
    compression = hvc.Compression.topk(named, density=0.05, schedule="layerwise", verify_every=1, timeout=20.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), named, compression=compression)
    compression.attach(optimizer)
    stray.connected = True
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        time.sleep(0.02)  # so that somebody can come in between
    found = {"weights": digest(model.parameters()), "seconds": time.monotonic() - began}
    compression.close()
    time.sleep(0.3)
    stray.over.set()
    stray.thread.join(5.0)
    left = listeners() - stray.known
    return found | {"met": sorted(stray.met), "late": sorted(stray.late), "left": sorted(left)}


check("calm", lambda: play(None))
for name in case["attacks"]:
    check(name, lambda attack=ATTACKS[name]: play(attack))
