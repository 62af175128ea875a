"""One bucket of the plan on one rank: its memory, its kinds of rounds, and how far it is in this step.

Nothing here knows another bucket, a thread or a lock: :mod:`horovod_compress.engine.reducer` brings these together.
"""
