"""What the ranks compare with each other, and how a difference is reported: each rank's part, and the same end on all.

How the values come from rank to rank does not belong here: a front or the exchange brings them.
"""
