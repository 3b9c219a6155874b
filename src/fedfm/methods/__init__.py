"""Federated methods: one file for each algorithm, a folder if it owns numerics. The file's name is the method's."""
