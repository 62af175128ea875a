"""What several methods share: how signs, codes, positions and their values lie in a payload.

A module belongs here when methods of one family use it and it is no method itself.
"""
