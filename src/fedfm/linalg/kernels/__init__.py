"""Compiled loops on NumPy arrays. These modules import numba, so callers import them just before they run a loop."""
