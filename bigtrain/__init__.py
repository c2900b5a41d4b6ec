"""bigtrain: one config-driven program that trains large models in JAX."""

__version__ = "0.1.0"
