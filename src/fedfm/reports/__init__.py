"""Write HTML pages and tables from the files of a run directory."""
