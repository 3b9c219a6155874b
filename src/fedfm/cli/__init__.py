"""Command line: commands, their help, the progress bar, ``doctor``."""

from fedfm.cli.entry import main

__all__ = ["main"]
