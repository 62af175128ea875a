"""torch.distributed: the communication hook that DistributedDataParallel is given, and how its ranks meet.

Nothing of Horovod's is needed here.
"""
