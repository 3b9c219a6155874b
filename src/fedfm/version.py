"""The version number of this release."""

__version__ = "0.2.0"
