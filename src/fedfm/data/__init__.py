"""Data: sources, partitions, and the rows that each client holds."""
