"""One run: its directory, its server loop, its clients, evaluation, and what is kept and checked between rounds."""
