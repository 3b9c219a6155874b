"""Messages as files in a folder, on a disk that is carried or synchronised, for silos without network connections."""
