"""Training of drafters, and of the tiny models that ship with the package."""
