"""The engine for one machine: this process, and worker processes that it forks."""
