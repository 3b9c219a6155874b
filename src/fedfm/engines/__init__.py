"""Engines deliver requests to clients: in this process, in worker processes, over Flower, or as files in a folder."""
