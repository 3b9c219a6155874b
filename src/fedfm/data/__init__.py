"""Sources, tables and partitions of the clients' rows."""
