"""The systems that are compared, all on the same target and drafter (method of the HybridSpec paper, section 4.1)."""

from dataclasses import dataclass

from ..calibration.profile import CalibrationProfile
from ..generation.length_policies import MIN_LENGTH, LengthPolicy, parse_policy
from ..kernels.gated_delta_rule import MAX_ROWS
from ..modeling.drafter import Drafter

AUTOREGRESSIVE = "ar"
LENGTHS = range(MIN_LENGTH, MAX_ROWS + 1)


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        title: as tables and plots print it.
        policy: name of the length policy; `static` stands for the calibrated static length; None drafts nothing.
        verification: how GDN layers verify, `compact`, `stored` or `replay`.
    """

    title: str
    policy: str | None
    verification: str

    @property
    def is_adaptive(self) -> bool:
        """Whether the length is chosen in every round."""
        return self.policy not in (None, "full") and not self.policy.startswith("static")

    def length_policy(self, profile: CalibrationProfile | None) -> LengthPolicy | None:
        """A fresh policy; raises ValueError if it needs a profile and there is none. Never guarded."""
        if self.policy is None:
            return None
        if self.policy == "static":
            if profile is None:
                raise ValueError("The calibrated static length is in the profile. Give --profile, or leave it out.")
            return parse_policy(f"static:{profile.static_length}")
        policy = parse_policy(self.policy, profile)
        policy.is_guarded = False
        return policy


# The rows of the paper's tables.
NAMED: dict[str, System] = {
    AUTOREGRESSIVE: System("AR target", None, "compact"),
    "vanilla": System("Vanilla DFlash", "full", "stored"),
    "dcut": System("D-Cut", "dcut", "stored"),
    "evict": System("EVICT", "evict", "stored"),
    "replayssm": System("ReplaySSM", "full", "replay"),
    "evict+replayssm": System("EVICT + ReplaySSM", "evict", "replay"),
    "full": System("Full length", "full", "compact"),
    "static": System("Calibrated static", "static", "compact"),
    "confidence": System("Confidence scheduler", "confidence", "compact"),
    "hybridspec+stored": System("HybridSpec, stored states", "hybridspec", "stored"),
    "nominal": System("Nominal only", "nominal", "compact"),
    "hybridspec": System("HybridSpec", "hybridspec", "compact"),
}
# And every fixed length, of which one is the best for a kind of text, with hindsight.
FIXED = {f"static:{rows}": System(f"Static, {rows} rows", f"static:{rows}", "compact") for rows in LENGTHS}
SYSTEMS = NAMED | FIXED
NAMES = f"{', '.join(NAMED)}, static:{LENGTHS[0]} to static:{LENGTHS[-1]}"


def choose_systems(names: list[str] | None, profile: CalibrationProfile | None, drafter: Drafter) -> dict[str, System]:
    """The named systems, or all of `NAMED` that this profile and drafter allow; `ar` is always among them.

    Raises:
        ValueError: a name is unknown, or cannot run.
    """
    if names is None:
        has_head = getattr(drafter, "confidence_head", None) is not None
        names = [
            name
            for name, system in NAMED.items()
            if (profile is not None or system.policy in (None, "full")) and (has_head or name != "confidence")
        ]
    for name in names:
        if name not in SYSTEMS:
            raise ValueError(f"Unknown system {name!r}. Use some of {NAMES}.")
        SYSTEMS[name].length_policy(profile)
    return {name: SYSTEMS[name] for name in dict.fromkeys([AUTOREGRESSIVE, *names])}
