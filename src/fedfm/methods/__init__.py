"""Federated methods: one file for each algorithm, a folder if it owns numerics. The file's name is the method's.

BlindFed, which computes on encrypted rows, is in its own wing: :mod:`fedfm.encrypted.blindfed`.
"""
