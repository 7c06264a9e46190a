"""What a call of generate() did, beside its tokens."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationStatistics:
    """Counts of one call.

    Attributes:
        path: `graphs` (our loop, its rounds captured), `round` (our loop, eager) or `host` (transformers' loop).
        policy: name of the length policy, `plain` without a drafter.
        reason: why no faster path was taken; empty where `graphs` was, or another was asked for.
        verification_lengths: rows of the target forward of each verification round, anchor included.
        emitted: tokens that each round emitted. The prefill's first token belongs to no round.
    """

    path: str
    policy: str
    reason: str = ""
    verification_lengths: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    def add_round(self, verification_length: int, num_emitted: int) -> None:
        """Counts one verification round."""
        self.verification_lengths.append(verification_length)
        self.emitted.append(num_emitted)

    @property
    def rounds(self) -> int:
        """Verification rounds."""
        return len(self.emitted)

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per verification round; 0 without a round."""
        return sum(self.emitted) / self.rounds if self.rounds else 0.0

    @property
    def mean_verification_length(self) -> float:
        """Mean rows of a verification round; 0 without a round."""
        return sum(self.verification_lengths) / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for a log line or JSON."""
        return {
            "path": self.path,
            "policy": self.policy,
            "reason": self.reason,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "mean_verification_length": self.mean_verification_length,
        }
