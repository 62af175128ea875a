"""Odd ways of using gradients, passes, models: each of them once."""
