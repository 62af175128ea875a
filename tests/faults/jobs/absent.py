"""One rank ends before the handshake, by an error of its own; the others come to it and wait."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from horovod_compress import rollcall
from tests.support.rank import arguments, report

case = arguments()
hvd.init()
if hvd.rank() == case["victim"]:
    others = [f"hvc.handshake.0.{rank}" for rank in range(hvd.size()) if rank != hvd.rank()]
    while not all(rollcall._call("GET", key) for key in others):
        time.sleep(0.05)
    raise RuntimeError("this rank's own error")
began = time.monotonic()
try:
    hvc.Compression.none(torch.nn.Linear(2, 2).named_parameters(), timeout=case["timeout"])
except Exception as error:
    report({"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began})
