"""Horovod: the compression that its optimizer is given, how one starts, and the calls into Horovod that need a bound.

Whatever imports ``horovod.torch`` belongs here, also for commands that run in a Horovod job; nothing else imports it.
"""
