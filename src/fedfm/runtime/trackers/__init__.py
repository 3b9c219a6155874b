"""Experiment trackers, each behind its own extra, by the callbacks of :class:`fedfm.runtime.progress.Progress`.

They read what the run directory has anyway, and write nothing that a resume needs.
"""
