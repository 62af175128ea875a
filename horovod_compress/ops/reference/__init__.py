"""Every operation again, in slow and readable NumPy: what the compiled ones must equal bit for bit.

A module here has the name of the one beside which it stands, and the same functions with the same arguments.
"""
