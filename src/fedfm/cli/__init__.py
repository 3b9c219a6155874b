"""The command line: the commands and their help texts."""

from fedfm.cli.entry import main

__all__ = ["main"]
