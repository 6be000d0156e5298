"""The version of this package, importable without any of its dependencies."""

__version__ = "0.1.0"
