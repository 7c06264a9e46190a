"""The contracts of a device round, met by the eager pieces: any target and drafter, lengths read on the host."""

from dataclasses import dataclass

import torch

from hf_hybridspec.generation.device_round import DeviceRound, RoundParts
from hf_hybridspec.generation.draft_session import DraftSession
from hf_hybridspec.modeling.draft import Draft
from hf_hybridspec.modeling.hybrid_cache import HybridCache
from hf_hybridspec.modeling.sparse_moe import Routing
from hf_hybridspec.modeling.split_forward import RouterBoundary, SplitForward

CAPACITY = 1 << 20


@dataclass(frozen=True)
class SteppedBoundary:
    """What stage0 leaves, with the routing under the name that a device round reads."""

    inner: RouterBoundary
    routed: Routing | None


class SteppedBlock:
    """A HybridCache behind the interface of BlockState."""

    def __init__(self, cache: HybridCache):
        self.cache = cache
        self.committed = torch.tensor([cache.committed_length], dtype=torch.int32)

    def commit(self, commit_length: torch.Tensor) -> None:
        self.cache.commit(int(commit_length))
        self.committed += commit_length


class SteppedTarget:
    """A SplitForward behind the interface of FusedForward."""

    def __init__(self, forward: SplitForward):
        self.forward = forward

    def stage0(self, token_ids, position_offset, state: SteppedBlock) -> SteppedBoundary:
        state.cache.begin_block(token_ids.shape[0])
        positions = state.committed + position_offset + torch.arange(token_ids.shape[0])
        boundary = self.forward.stage0(token_ids[None], positions[None], state.cache)
        return SteppedBoundary(boundary, boundary.routing)

    def stage1(self, boundary: SteppedBoundary, length: int, state: SteppedBlock):
        return self.forward.stage1(boundary.inner, length, state.cache, None)


class SteppedDrafter:
    """A DraftSession behind the interface of FusedDrafter."""

    def __init__(self, session: DraftSession):
        self.session = session
        self.num_draft_tokens = session.drafter.num_draft_tokens

    def propose(self, anchor, recurrent_states) -> Draft:
        return self.session.propose(anchor)

    def observe(self, features, commit_length) -> None:
        self.session.observe(features[: int(commit_length)])


def stepped_round(forward: SplitForward, cache: HybridCache, session: DraftSession | None) -> DeviceRound:
    """A device round over a prefilled cache."""
    drafter = None if session is None else SteppedDrafter(session)
    parts = RoundParts(SteppedTarget(forward), SteppedBlock(cache), CAPACITY, drafter, {})
    return DeviceRound(parts, torch.device("cpu"))
