"""What is kept between steps: buckets, residuals, threads, and what the ranks have agreed on.

The engine brings codecs and exchange together: it knows parameters by name and gradients by the bucket they travel in,
and no framework. What begins, ends, saves or changes a running reducer belongs here too. What the ranks compare with
each other is in :mod:`.agreement`, what depends on the user's optimizer in :mod:`.optimizer`.
"""
