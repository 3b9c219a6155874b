"""Tasks, one a file: which rows a task reads, its head, its loss, its scores, what predict writes, what exports say.

A file here is a task: nothing lists the names. ``fedfm.core.tasks`` finds them, and packages below this one ask it.
Modules of this package import at their head nothing above ``core``, since the settings are made from them; methods
import what they compute with when they run.
"""
