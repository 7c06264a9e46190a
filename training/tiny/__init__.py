"""Scripts that rebuild the bundled models from named package versions.

Each is a small command line (`python -m training.tiny.NAME --help`); docs/tiny_models.md has their order.
"""
