"""Reports of runs: one self-contained page, tables for the terminal, from the files of a run directory alone."""
