"""How payloads of all ranks become one result: ``ring`` and ``fold``, and ``everywhere`` for small arrays.

Frames, partitions, deadlines, devices and the choice of a collective belong here, and nothing of a method but its
algebra; what a payload means is the codec's. Bytes are moved by :mod:`.transports`.
"""
