"""Any drafter behind the interface of FusedDrafter, so that calls with scripted drafters take fixed buffers too."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from hf_hybridspec.generation import round_engine
from hf_hybridspec.modeling.draft_context import DraftContext
from hf_hybridspec.modeling.drafter import Drafter


class HostDrafter:
    """Drafts with the drafter's own methods, on the context that a call hands over."""

    def __init__(self, drafter: Drafter, max_context: int):
        self.drafter = drafter
        self.num_draft_tokens = drafter.num_draft_tokens
        self._context, self._position = None, 0

    def context_obstacle(self, context: DraftContext) -> str | None:
        return None

    def begin(self, context: DraftContext) -> None:
        self._context = context
        self._position = int(context.layers[0].positions[-1]) + 1

    def end(self, context: DraftContext) -> None:
        assert context is self._context

    def propose(self, anchor, recurrent_states):
        return self.drafter.propose(self._context, anchor, self._position, recurrent_states)

    def observe(self, features, commit_length) -> None:
        count = int(commit_length)
        positions = torch.arange(self._position, self._position + count)
        self.drafter.observe(self._context, features[:count], positions)
        self._position += count


@contextmanager
def host_drafted_device_rounds() -> Iterator[None]:
    """Calls take fixed buffers and eager device rounds, whatever their drafter."""
    with (
        round_engine.eager_device_rounds(),
        mock.patch.object(round_engine, "FusedDrafter", HostDrafter),
        mock.patch.object(round_engine, "drafter_obstacle", lambda drafter: None),
    ):
        yield
