"""The shared library of tasuki. It knows nothing about roles: those live in the top-level
folders.
"""

__version__ = "0.1.0"
