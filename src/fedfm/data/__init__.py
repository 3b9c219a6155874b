"""Sources, tables, partitions: the rows that each client holds."""
