"""GDN verification and commit of other engines, timed beside ours: SGLang 0.5.23 and fla-core 0.6.0.

Each is called as its engine calls it, on states in its own layout, for one request with every row accepted. Where
several ways are open, the one that favours the peer is taken:

- state per row (SGLang's default): a verification per layer writes the state after every row, one launch for all
  layers copies the accepted ones. Its tile is 4 value columns on Hopper; 32 elsewhere and before.
- ReplaySSM: verified rows join a ring of records; a commit moves cursors and, when the ring is full, folds it into
  all states. A graph of it holds whole cycles of the ring, and the time of a round is their mean.
- fold: verified rows are kept as they came; a commit repeats them on the states of all layers in one launch.
- prefix rerun (fla-core): a verification per layer leaves no state; a commit runs the accepted rows again, here in
  place and for all layers in one launch, which its own function cannot.
"""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from benchmarks.gated_delta_layers import DEVICE, LayerRows, Shape
from benchmarks.peer_kernels import PeerKernels

# Every round of a bound peer: rows of all layers -> outputs `[1, n, HV, V]` or `[n, HV, V]` of each layer.
Round = Callable[[LayerRows], list[torch.Tensor]]


class SglangPeer:
    """What SGLang's ways share: states `[L, 1, HV, V, K]`, one slot, one request of n rows.

    Attributes:
        rounds_in_cycle: rounds after which the states hold everything that was committed.
    """

    value_first = True
    beta_is_unrounded = True
    rounds_in_cycle = 1

    def __init__(self, kernels: PeerKernels, shape: Shape, rows: int, dtype: torch.dtype):
        self.kernels, self.shape, self.rows, self.dtype = kernels, shape, rows, dtype
        self.slot, self.starts, self.accepted, self.last_row = (
            torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([0], [0, rows], [rows], [rows - 1])
        )

    def room(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Zeroed `[L, 1, *sizes]`, in the rows' dtype if none is given."""
        return torch.zeros(self.shape.layers, 1, *sizes, dtype=dtype or self.dtype, device=DEVICE)

    def update(self, module: ModuleType, rows: LayerRows, states: torch.Tensor, i: int, **more) -> torch.Tensor:
        """The recurrent kernel on layer i, which leaves its state alone."""
        return module.fused_sigmoid_gating_delta_rule_update(
            A_log=rows.A_log[i],
            a=rows.a[i, 0],
            dt_bias=rows.dt_bias[i],
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=rows.query[i],
            k=rows.key[i],
            v=rows.value[i],
            b=rows.b[i, 0],
            initial_state_source=states[i],
            initial_state_indices=self.slot,
            cu_seqlens=self.starts,
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            **more,
        )


class StatePerRow(SglangPeer):
    """SGLang's default: the state after every row is written, and the accepted one copied back."""

    def __init__(self, *arguments, is_narrow: bool = True):
        super().__init__(*arguments)
        self.module = self.kernels.narrow if is_narrow else self.kernels.wide
        heads = (self.shape.num_v_heads, self.shape.v_dim, self.shape.k_dim)
        self.after_rows = self.room(self.rows, *heads, dtype=torch.float32)

    def bind(self, states: torch.Tensor) -> Round:
        def run(rows: LayerRows) -> list[torch.Tensor]:
            outputs = [
                self.update(
                    self.module,
                    rows,
                    states,
                    i,
                    intermediate_states_buffer=self.after_rows[i],
                    intermediate_state_indices=self.slot,
                    cache_steps=self.rows,
                )
                for i in range(self.shape.layers)
            ]
            # Source rows are given: else every call launches one more kernel that counts them.
            self.kernels.scatter.fused_mamba_state_scatter_with_mask(
                states, self.after_rows, self.slot, self.last_row, self.slot
            )
            return outputs

        return run


class Fold(SglangPeer):
    """SGLang's fold at every commit: the rows are kept as they came and repeated on the states."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        shape = self.shape
        self.raw = {
            "replayssm_rawv": self.room(shape.num_v_heads, self.rows, shape.v_dim),
            "replayssm_rawk": self.room(shape.num_k_heads, self.rows, shape.k_dim),
            "replayssm_g": self.room(shape.num_v_heads, self.rows, dtype=torch.float32),
            "replayssm_beta": self.room(shape.num_v_heads, self.rows, dtype=torch.float32),
        }

    def bind(self, states: torch.Tensor) -> Round:
        def run(rows: LayerRows) -> list[torch.Tensor]:
            outputs = [
                self.update(
                    self.kernels.wide,
                    rows,
                    states,
                    i,
                    cache_ring=True,
                    **{name: ring[i] for name, ring in self.raw.items()},
                )
                for i in range(self.shape.layers)
            ]
            self.kernels.fold.commit_gdn_replayssm_fold_all_layers(
                states,
                *self.raw.values(),
                self.slot,
                self.accepted,
                max_cache_len=self.rows,
                num_k_heads=self.shape.num_k_heads,
            )
            return outputs

        return run


class Replay(SglangPeer):
    """SGLang's ReplaySSM: a ring of at least 16 records a state, and of two blocks.

    Args:
        launch: tile and warps of the verification in place of SGLang's own.
    """

    def __init__(self, *arguments, launch: dict[str, int] | None = None):
        super().__init__(*arguments)
        self.launch = launch or {}
        self.length = max(16, _power_of_two(2 * self.rows))
        # A ring is folded when it could not take two blocks more.
        self.rounds_in_cycle = self.length // self.rows - 1

    def bind(self, states: torch.Tensor) -> Round:
        shape, length = self.shape, self.length
        v_ring, k_ring = (shape.num_v_heads, length, shape.v_dim), (shape.num_k_heads, length, shape.k_dim)
        d, k, g = self.room(*v_ring), self.room(*k_ring), self.room(*v_ring[:2], dtype=torch.float32)
        # What 16-bit records lose is kept in a second ring.
        low_d, low_k = (None, None) if self.dtype == torch.float32 else (self.room(*v_ring), self.room(*k_ring))
        cursors = {
            "write_pos": torch.zeros(1, dtype=torch.int32, device=DEVICE),
            "cache_base": torch.zeros(1, dtype=torch.int32, device=DEVICE),
            "is_flush": torch.zeros(1, dtype=torch.int8, device=DEVICE),
            "replay_indices": self.slot,
            "null_block_id": -1,
        }

        def verify(rows: LayerRows, i: int) -> torch.Tensor:
            return self.kernels.replay.gdn_replayssm_spec_decode(
                rows.query[i, 0],
                rows.key[i, 0],
                rows.value[i, 0],
                rows.a[i, 0],
                rows.b[i, 0],
                rows.A_log[i],
                rows.dt_bias[i],
                checkpoint_state=states[i],
                d_cache=d[i],
                k_cache=k[i],
                g_cache=g[i],
                rawv_cache=None if low_d is None else low_d[i],
                rawk_cache=None if low_k is None else low_k[i],
                beta_cache=None,
                out=torch.empty_like(rows.value[i, 0]),
                query_start_loc=self.starts,
                ssm_state_indices=self.slot,
                max_cache_len=length,
                max_spec_len=self.rows,
                launch_mode="verify",
                **cursors,
                **self.launch,
            )

        def run(rows: LayerRows) -> list[torch.Tensor]:
            outputs = [verify(rows, i) for i in range(shape.layers)]
            self.kernels.replay.commit_gdn_replayssm_spec(
                num_accepted=self.accepted, max_cache_len=length, max_spec_len=self.rows, **cursors
            )
            self.kernels.replay.commit_gdn_replayssm_circular(
                checkpoint_state=states,
                d_cache=d,
                k_cache=k,
                g_cache=g,
                d_residual_cache=low_d,
                k_residual_cache=low_k,
                state_batch_indices=self.slot,
                accept_lens=self.accepted,
                **cursors,
            )
            return outputs

        return run


class PrefixRerun:
    """fla-core's recurrent kernel, once to verify and once more to commit. States `[L, 1, HV, K, V]`."""

    value_first = False
    beta_is_unrounded = False
    rounds_in_cycle = 1

    def __init__(self, kernels: PeerKernels, shape: Shape, rows: int, dtype: torch.dtype):
        self.kernels, self.shape, self.rows = kernels, shape, rows

    def _launch(self, sequences: int, tensors: dict[str, torch.Tensor | None]) -> None:
        shape = self.shape
        block_v = min(8, _power_of_two(shape.v_dim))
        kernel = self.kernels.prefix.fused_recurrent_gated_delta_rule_fwd_kernel
        kernel[(math.ceil(shape.v_dim / block_v) * sequences * shape.num_v_heads,)](
            **tensors,
            **dict.fromkeys(("gk", "gv", "A_log", "dt_bias", "cu_seqlens")),
            scale=shape.k_dim**-0.5,
            T=self.rows,
            H=shape.num_k_heads,
            HV=shape.num_v_heads,
            K=shape.k_dim,
            V=shape.v_dim,
            BK=_power_of_two(shape.k_dim),
            BV=block_v,
            IS_BETA_HEADWISE=True,
            USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=False,
            ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=False,
            num_warps=1,
            num_stages=3,
        )

    def bind(self, states: torch.Tensor) -> Round:
        def run(rows: LayerRows) -> list[torch.Tensor]:
            outputs = [torch.empty_like(value) for value in rows.value]
            names = ("q", "k", "v", "g", "beta")
            for i, output in enumerate(outputs):
                layer = dict(zip(names, rows.layer(i), strict=True))
                self._launch(1, layer | {"o": output, "h0": states[i], "ht": None})
            stacked = (rows.query, rows.key, rows.value, rows.log_decay, rows.beta)
            again = {name: x[:, 0] for name, x in zip(names, stacked, strict=True)}
            self._launch(self.shape.layers, again | {"o": torch.empty_like(again["v"]), "h0": states, "ht": states})
            return outputs

        return run


def _power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


Peer = SglangPeer | PrefixRerun
PEERS: dict[str, Callable[..., Peer]] = {
    "sglang": StatePerRow,
    "sglang_tile_32": partial(StatePerRow, is_narrow=False),
    "sglang_replayssm": Replay,
    "sglang_fold": Fold,
    "fla_prefix_rerun": PrefixRerun,
}
