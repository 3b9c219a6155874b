"""Tasks, one per file: the rows that a task reads, its head, loss and scores, its predictions and exports.

Each file here without a leading underscore, except ``task``, is a task and has the task's name. There is no list of
tasks: ``fedfm.core.tasks`` finds them for the packages below this one, and a run imports only its own task. Settings
are made from these modules, so at their head they import nothing above ``core``. A method imports what it needs.
"""

DEFAULT = "classification"  # the task of rows that imply no other
UNNAMED = ("own",)  # tasks that experiment files cannot name
INTERFACE = "task"  # the file with the base class of all tasks
