"""What the fronts have in common: how a compression starts, what begins a step, what is saved.

No framework is imported here: what depends on one is asked of a :class:`~horovod_compress.engine.job.Job`.
"""
