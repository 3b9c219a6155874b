"""Federated methods: one file for each algorithm, a folder if it owns numerics. The file's name is the method's.

BlindFed, which computes on encrypted rows, has a wing of its own: :mod:`fedfm.encrypted.blindfed`.
"""
