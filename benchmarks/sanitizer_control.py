"""Two faults that a sanitizer has to find: the negative control of `benchmarks.sanitize`, run under the same filters.

compute-sanitizer --tool racecheck python -m benchmarks.sanitizer_control race
"""

import sys

import torch
import triton
import triton.language as tl

LANES = 128
# Farther than anything that a process with one small tensor has allocated.
FAR = 2**30


@triton.jit
def _control_kernel(numbers, distance, RACES: tl.constexpr, LANES: tl.constexpr):
    o = tl.arange(0, LANES)
    # The sum goes through shared memory, which the race below needs.
    b_sum = tl.sum(tl.load(numbers + o))
    b_own = o + b_sum
    if RACES:
        # Every lane writes its own number to one address.
        asm: tl.constexpr = "{ .reg .u32 a; mov.u32 a, global_smem; st.shared.u32 [a], $1; ld.shared.u32 $0, [a]; }"
        b_own = tl.inline_asm_elementwise(asm, "=r,r", [b_own], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(numbers + distance + o, b_own)


def main() -> None:
    races = sys.argv[1:] == ["race"]
    if not races and sys.argv[1:] != ["memory"]:
        raise SystemExit(f"Give race or memory, got {sys.argv[1:]}.")
    numbers = torch.zeros(LANES, dtype=torch.int32, device="cuda")
    _control_kernel[(1,)](numbers, 0 if races else FAR, RACES=races, LANES=LANES)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
