"""The engine for one machine: this process and its worker processes."""
