"""Sources of rows: one file each, with a function ``read`` that returns a Table."""
