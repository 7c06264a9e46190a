"""Recorded rounds in the order in which a benchmark lays them on a device: calibration first, then tests by kind."""

from dataclasses import dataclass

import numpy as np

from hf_hybridspec.calibration.rounds import PromptRounds, RoundArrays

CALIBRATION = "calibration"


@dataclass(frozen=True)
class OrderedRounds:
    """Rounds of calibration and test prompts, each part shuffled, so that few rounds come from many prompts.

    Attributes:
        rounds: all of them.
        windows: `calibration` or a kind -> index of its first round, and how many there are.
    """

    rounds: RoundArrays
    windows: dict[str, tuple[int, int]]

    @property
    def kinds(self) -> list[str]:
        return [name for name in self.windows if name != CALIBRATION]

    @property
    def known(self) -> RoundArrays:
        """Those of calibration."""
        return self.rounds[: self.windows[CALIBRATION][1]]

    @property
    def unseen(self) -> RoundArrays:
        """Those of all tests."""
        return self.rounds[self.windows[CALIBRATION][1] :]

    @classmethod
    def of(cls, calibration: list[PromptRounds], test: list[PromptRounds], seed: int) -> "OrderedRounds":
        """Orders the rounds of prompts that nobody else has.

        Raises:
            ValueError: a half has no round.
        """
        border, unseen = RoundArrays.of(calibration).num_rounds, RoundArrays.of(test)
        members = {CALIBRATION: np.arange(border)}
        for kind in sorted(set(unseen.kind)):
            members[str(kind)] = border + np.flatnonzero(unseen.kind == kind)
        generator, start, windows = np.random.default_rng(seed), 0, {}
        for name, indices in members.items():
            windows[name] = (start, len(indices))
            start += len(indices)
        order = np.concatenate([generator.permutation(indices) for indices in members.values()])
        return cls(RoundArrays.of([*calibration, *test])[order], windows)
