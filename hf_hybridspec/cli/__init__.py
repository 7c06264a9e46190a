"""The command hf-hybridspec: generate and info."""

from .command import main

__all__ = ["main"]
