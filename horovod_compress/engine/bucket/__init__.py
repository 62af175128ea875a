"""What one bucket of the plan is made of on one rank: its memory, its kinds of rounds, and what these leave out.

Nothing here knows another bucket, a thread or a lock: :mod:`horovod_compress.engine.reducer` brings these together.
"""
