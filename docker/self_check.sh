#!/bin/sh
# Whether an image can do its work: run at the end of its build, and by anyone later on.
set -eu
hvd-compress --check-build
horovodrun -np 2 python "$(dirname "$0")/two_ranks.py"
