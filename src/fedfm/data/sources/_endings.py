"""Endings of files that are rows."""

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    *(".apng", ".avif", ".dib", ".jfif", ".jpe", ".jp2", ".j2k", ".pbm", ".pnm", ".tga"),
)
FILES = {"image": SUFFIXES, "recording": (".wav", ".flac", ".ogg", ".mp3", ".oga", ".opus", ".aif", ".aiff")}
