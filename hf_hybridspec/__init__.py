"""Exact speculative decoding of hybrid Gated DeltaNet + MoE models for Hugging Face transformers."""
