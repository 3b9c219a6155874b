"""Federated methods. Each method has one file of its name, or a folder if it has numerics of its own.

BlindFed, which computes on encrypted rows, is in another package: :mod:`fedfm.encrypted.blindfed`.
"""
