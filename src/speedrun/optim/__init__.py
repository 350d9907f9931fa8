"""Optimizers. This package imports torch alone."""
