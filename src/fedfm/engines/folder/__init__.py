"""Messages as files in a folder that somebody carries or a shared disk syncs, for silos without connections."""
