"""Experiment trackers, which get their data by the callbacks of :class:`fedfm.runtime.progress.Progress`.

Each tracker has its own extra. Trackers show what the run directory also has, and write nothing that a resume needs.
"""
