"""Messages as files in a folder, on a carried or synced disk, for silos without network connections."""
