"""Models that ``fully_shard`` divides: what ranks compare and exchange is the shard that they have.

Hooks, passes and groups are those of :mod:`..torch_dist`.
"""
