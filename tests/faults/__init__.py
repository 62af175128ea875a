"""Faults of ranks, of their connections and of what they hand over."""

from pathlib import Path

JOBS = Path(__file__).parent / "jobs"
