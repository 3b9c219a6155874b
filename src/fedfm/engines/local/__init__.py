"""The engine of one machine: this process, and worker processes that are forked from it."""
