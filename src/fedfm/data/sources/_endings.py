"""Endings of files that are rows."""

from fedfm.data.pictures import SUFFIXES

FILES = {"image": SUFFIXES, "recording": (".wav", ".flac", ".ogg", ".mp3", ".oga", ".opus", ".aif", ".aiff")}
