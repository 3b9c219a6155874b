"""Compiled loops, free of torch. Only modules of loops import numba, when a loop is about to run."""
