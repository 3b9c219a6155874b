"""Experiment trackers, which get their data by the callbacks of :class:`fedfm.runtime.progress.Progress`.

Each tracker has its own extra. A tracker shows only data that are also in the run directory, so a resumed run does not
need them.
"""
