"""Tasks, one per file: the rows that a task reads, its head, loss and scores, its predictions and exports.

Each file here is a task. There is no list of tasks: ``fedfm.core.tasks`` finds them for the packages below this one.
The settings are made from these modules, so at their head they import nothing above ``core``. A method imports the
modules that it needs when it runs.
"""
