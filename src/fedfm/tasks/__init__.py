"""Tasks, one per file: the rows that a task reads, its head, loss and scores, its predictions and exports.

Each file here is a task, and no list names them: ``fedfm.core.tasks`` finds them for the packages below this one.
At their head, modules here import nothing above ``core``, since the settings are made from them; their methods
import what they compute with when they run.
"""
