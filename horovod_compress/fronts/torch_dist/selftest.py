"""``python -m horovod_compress.fronts.torch_dist.selftest``: the ranks of ``hvd-compress verify`` as under torchrun."""

from __future__ import annotations

from ..common import selftest
from .ranks import begin

if __name__ == "__main__":
    selftest.serve(begin)
