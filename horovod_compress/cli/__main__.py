"""`python -m horovod_compress.cli` is `hvd-compress`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
