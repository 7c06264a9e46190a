"""Measurements of the kernels and of whole decodes; each module is a command that writes one JSON file of results."""
