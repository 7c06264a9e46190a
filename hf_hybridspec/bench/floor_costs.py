"""A cost curve from bytes: what a round of a large target takes if memory bandwidth were all that bounds it."""

from dataclasses import dataclass

from ..calibration.profile import CostModel
from .scripted_routing import RoutingScript


@dataclass(frozen=True)
class TargetBytes:
    """Bytes that a forward reads; the defaults are Qwen3.6-35B-A3B in bf16 with its DFlash drafter.

    Attributes:
        shared: all weights but the routed experts, and the GDN states read and written: once a forward.
        expert: one routed expert.
        stage0_row: what one more row reads and writes up to the first router.
        drafter: weights that drafting reads, the target's head included.
        bandwidth: bytes a second.
        overhead: seconds a round that no bytes explain.
    """

    shared: float = 3.88e9 + 2 * 62.9e6
    expert: float = 6.29e6
    stage0_row: float = 0.1e6
    drafter: float = 0.772e9 + 1.017e9
    bandwidth: float = 4.3e12
    overhead: float = 0.3e-3


def floor_costs(num_drafts: int, script: RoutingScript, sizes: TargetBytes) -> CostModel:
    """The cost model of that target under a routing script. Simulated: nothing is measured."""

    def seconds(length: int) -> float:
        experts = script.num_layers * script.mean_distinct(length) * sizes.expert
        rows = length * sizes.stage0_row * script.num_layers
        return (sizes.shared + experts + rows) / sizes.bandwidth

    fixed = sizes.drafter / sizes.bandwidth + sizes.overhead
    rounds = tuple(fixed + seconds(length) for length in range(2, num_drafts + 2))
    return CostModel(
        measured=rounds,
        fitted=rounds,
        fixed=fixed,
        stage0_row=sizes.stage0_row / sizes.bandwidth,
        expert=sizes.expert / sizes.bandwidth,
        autoregressive=seconds(1),
    )
