"""Benchmarks of decoding systems on one target and drafter: sessions, tables, plots, and trace-driven runs."""
