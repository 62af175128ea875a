"""The parts of tools/cuda_check.py: what each runs, how long it may take, how it ended, and the report of all.

Only the standard library: torch is asked in a process with a time limit, as everything else here.
"""
