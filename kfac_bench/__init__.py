"""A training harness and benchmark suite for distributed K-FAC."""

__version__ = "0.1.0"
