"""Federated methods: one file an algorithm, a folder where it owns numerics. The file's name is the method's."""
