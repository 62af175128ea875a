"""The command line, `hvd-compress`: what people ask for and read belongs here, and nothing that a job needs.

There is one file per verb. No module here imports torch or Horovod before it is asked to.
"""

from .command import main as main
