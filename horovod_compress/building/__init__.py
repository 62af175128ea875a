"""Building Horovod for the torch that is there: what `make setup` and `hvd-compress build-horovod` share.

Only the standard library, and nothing of the rest of the package: these modules run before anything is installed.
"""
