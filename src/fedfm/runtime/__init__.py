"""One run: its directory, its server loop, its clients, its evaluation, and the checks between rounds."""
