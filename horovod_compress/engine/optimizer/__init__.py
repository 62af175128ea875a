"""What depends on the optimizer that takes the results: its momentum, its second moment, and its steps in update mode.

It is a plain optimizer of torch; what Horovod makes of one belongs into its front.
"""
