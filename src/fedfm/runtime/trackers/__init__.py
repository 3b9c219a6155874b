"""Experiment trackers. They get their data by the callbacks of :class:`fedfm.runtime.progress.Progress`.

Each tracker has its own extra. A tracker shows what the run directory has, too, and writes nothing that a resume needs.
"""
