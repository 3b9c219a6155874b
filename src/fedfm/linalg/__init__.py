"""Parameters as vectors: their algebra, in memory and in files."""
