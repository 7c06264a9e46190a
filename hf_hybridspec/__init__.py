"""Exact speculative decoding of hybrid Gated DeltaNet + MoE models for Hugging Face transformers."""

from .generation.attach import HybridSpecModelForCausalLM, attach, detach
from .generation.candidate_generator import HybridSpecCandidateGenerator
from .generation.length_policies import Full, HybridSpec, LengthPolicy, Static
from .modeling.auto import AutoDrafter
from .modeling.hybrid_cache import HybridCache

__all__ = [
    "AutoDrafter",
    "Full",
    "HybridCache",
    "HybridSpec",
    "HybridSpecCandidateGenerator",
    "HybridSpecModelForCausalLM",
    "LengthPolicy",
    "Static",
    "attach",
    "detach",
]
