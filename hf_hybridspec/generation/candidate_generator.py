"""HybridSpecCandidateGenerator: drafts for transformers' own assisted decoding, the compatibility path."""

import torch
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from ..modeling.hybrid_cache import HybridCache
from .decoding import longest_length
from .draft_session import DraftSession
from .length_policies import LengthPolicy
from .statistics import GenerationStatistics


class HybridSpecCandidateGenerator(CandidateGenerator):
    """Proposes `w0 - 1` drafts and no draft logits, so that the host's sample-and-compare is the point-mass rule.

    No drafts are proposed with the prefill, and none past a token at which a stopping criterion would stop: the host
    asks its criteria once a block only. Criteria other than EOS, length and time are therefore asked about drafts too.

    Args:
        session: the drafter at work.
        cache: the target's cache.
        max_length: of the sequence, as the host counts it.
    """

    requires_model_outputs = True

    def __init__(
        self,
        session: DraftSession,
        cache: HybridCache,
        policy: LengthPolicy,
        stopping_criteria: StoppingCriteriaList,
        max_length: int,
        statistics: GenerationStatistics,
    ):
        self._session = session
        self._cache = cache
        self._policy = policy
        self._max_length = max_length
        self._statistics = statistics
        self._stopping_criteria = StoppingCriteriaList(
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria))
        )
        self._block_features: torch.Tensor | None = None
        self._verification_length = 0

    @property
    def model_kwargs_overrides(self) -> dict:
        """Nothing: the taps come by hooks, so the user's own output flags keep their meaning."""
        return {}

    def on_features(self, features: torch.Tensor) -> None:
        """Takes the taps of a target forward: of the prefill at once, of a block until it is known "
        "what is accepted."""
        if self._cache.block_length:
            self._block_features = features
        else:
            self._session.observe(features)

    def get_candidates(
        self, input_ids: torch.LongTensor, is_first_iteration: bool = False, **kwargs
    ) -> tuple[torch.LongTensor, None]:
        """The sequence `[1, n]` followed by the retained drafts; `kwargs` are the host's and unused."""
        if is_first_iteration:
            return input_ids, None
        draft = self._session.propose(input_ids[0, -1:])
        longest = longest_length(self._cache, self._max_length - input_ids.shape[1])
        drafts = draft.tokens[None, : min(self._policy.select(draft), longest) - 1]
        candidate_ids = self._before_stop(input_ids, drafts)
        self._verification_length = candidate_ids.shape[1] - input_ids.shape[1] + 1
        return candidate_ids, None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Called by the host after its commit: the committed rows reach the drafter."""
        if self._block_features is not None:
            self._session.observe(self._block_features[: num_matches + 1])
            self._block_features = None
            self._statistics.add_round(self._verification_length, int(num_matches) + 1)

    def _before_stop(self, input_ids: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """The sequence with the drafts up to, not including, the one at which a criterion stops."""
        sequence = torch.cat([input_ids, drafts], dim=1)
        for length in range(input_ids.shape[1] + 1, sequence.shape[1] + 1) if self._stopping_criteria else ():
            if bool(self._stopping_criteria(sequence[:, :length], None).all()):
                return sequence[:, : length - 1]
        return sequence
