"""The version of the package; that of the layout is in layout.py."""

__version__ = "0.1.0"
