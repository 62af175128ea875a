"""``python -m horovod_compress.fronts.horovod.selftest``: the ranks of ``hvd-compress verify`` as under Horovod."""

from __future__ import annotations

from ..common import selftest
from .ranks import begin

if __name__ == "__main__":
    selftest.serve(begin)
