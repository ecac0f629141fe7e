"""Data that ship with the package, for examples."""

from tukeyreg.datasets.california import Dataset, load_california

__all__ = ["Dataset", "load_california"]
