"""Compiled loops, free of torch. Numba is imported here alone, where a loop is about to run."""
