"""Compiled loops on NumPy arrays. Their modules import numba; callers import them just before they run a loop."""
