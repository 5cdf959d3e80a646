"""The version: the package, its metadata and the compiled module all take it from here."""

__version__ = "0.1.0"
