"""``python -m horovod_compress.fronts.horovod.selftest``: one rank of ``hvd-compress verify`` under Horovod."""

from __future__ import annotations

from ..common import selftest
from .ranks import begin

if __name__ == "__main__":
    selftest.main(begin())
