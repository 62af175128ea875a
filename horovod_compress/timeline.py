"""Put timelines side by side in one file: see :mod:`horovod_compress.observe.timeline`.

python -m horovod_compress.timeline all.json horovod.json trace.rank0.json trace.rank1.json
"""

import sys

from .observe.timeline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
