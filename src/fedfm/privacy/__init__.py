"""Privacy: secure aggregation, mechanisms, accounting. None is built in yet."""
