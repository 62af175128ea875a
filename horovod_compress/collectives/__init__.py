"""How payloads of all ranks become one result: ``ring`` and ``fold``, and ``everywhere`` for small arrays."""
