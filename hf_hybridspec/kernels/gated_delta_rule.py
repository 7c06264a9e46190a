"""Gated delta rule over a block of at most 16 rows: verify without touching the state, commit a prefix later.

HybridSpec, equations 3, 10 (verify) and 7 (commit). The math is in `gated_delta_rule_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation

MAX_ROWS = 16
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CompactFactors:
    """The compact factors (z, k, g) of a block, from which the state after any of its rows is rebuilt.

    Preallocated by the cache; may be views of larger buffers. One layer's are `[B, N, ...]`, those of L stacked
    layers `[L, B, N, ...]`, all fp32.

    Attributes:
        z: `[B, N, HV, V]`, update that each row writes.
        k: `[B, N, H, K]`, L2-normalised key of each row.
        g: `[B, N, HV]`, log-decay summed from the block's first row to each row.
    """

    z: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor

    @classmethod
    def empty(
        cls, *leading: int, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, device: torch.device | str
    ) -> "CompactFactors":
        """Uninitialised factors with the leading sizes `(B, N)` or `(L, B, N)`."""
        options = {"dtype": torch.float32, "device": device}
        return cls(
            z=torch.empty(*leading, num_v_heads, v_dim, **options),
            k=torch.empty(*leading, num_k_heads, k_dim, **options),
            g=torch.empty(*leading, num_v_heads, **options),
        )

    def __getitem__(self, index) -> "CompactFactors":
        """The same index taken of every field: one layer of stacked factors, or a range of rows. Views."""
        return CompactFactors(z=self.z[index], k=self.k[index], g=self.g[index])


def verify_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    factors: CompactFactors,
    state_is_settled: bool = False,
) -> torch.Tensor:
    """Outputs of n consecutive rows that follow `recurrent_state`, which stays as it is (HybridSpec, section on GDN).

    Writes rows 0..n-1 of `factors`; later rows are untouched. Value head j reads key head `j // (HV / H)`.

    Args:
        query: `[B, n, H, K]`, fp32, bf16 or fp16, after convolution and SiLU, not normalised, 1 <= n <= 16.
        key: `[B, n, H, K]`, likewise. Both are L2-normalised here (eps 1e-6); the query is then scaled by `K**-0.5`.
        value: `[B, n, HV, V]`, same dtype, HV a multiple of H.
        log_decay: `[B, n, HV]` fp32, at most 0, not accumulated.
        beta: `[B, n, HV]`, write strength, in the dtype in which the host rounds it.
        recurrent_state: `[B, HV, K, V]` fp32, committed state before the block, read only.
        factors: one layer's compact factors with at least n rows.
        state_is_settled: whether the kernel launched just before this one, on the same stream, leaves
            `recurrent_state` alone. The state may then be read while that kernel still runs, if it lets this one
            start early. The kernels of this package do so when all kernels before them have ended, except the one that
            combines the parts of an attention, which must not come just before this. False is always right.

    Returns:
        `[B, n, HV, V]` in the dtype of `value`.

    Raises:
        ValueError: a shape or dtype differs from the above, or n is out of range.
    """
    _check_verify(query, key, value, log_decay, beta, recurrent_state, factors)
    kernels = implementation("gated_delta_rule", recurrent_state.device)
    return kernels.verify_gated_delta_rule(
        query, key, value, log_decay, beta, recurrent_state, factors, state_is_settled
    )


def commit_gated_delta_rule(
    recurrent_states: torch.Tensor,
    factors: CompactFactors,
    commit_length: int | torch.Tensor,
    states_are_settled: bool = False,
) -> None:
    """Advances the states of all layers by the first `commit_length` rows of their blocks, in one launch.

    Args:
        recurrent_states: `[L, B, HV, K, V]` fp32, changed in place; bit-identical after a commit of 0 rows.
        factors: compact factors of the L layers, `[L, B, N, ...]`. Rows from `commit_length` on are never read.
        commit_length: 0..N, an int or an int32 or int64 tensor of one element on the states' device, which the
            Triton implementation reads on the device only (it must be in range: there it is not checked).
        states_are_settled: whether the kernel launched just before this one leaves `recurrent_states` alone, as for
            `verify_gated_delta_rule`; a verification does, another commit of the same layers does not.

    Raises:
        ValueError: a shape or dtype differs from the above, or an int `commit_length` is out of range.
    """
    _check_commit(recurrent_states, factors, commit_length)
    kernels = implementation("gated_delta_rule", recurrent_states.device)
    kernels.commit_gated_delta_rule(recurrent_states, factors, commit_length, states_are_settled)


def _check_verify(query, key, value, log_decay, beta, recurrent_state, factors) -> None:
    if query.dim() != 4 or query.shape != key.shape or value.dim() != 4 or value.shape[:2] != query.shape[:2]:
        raise ValueError(
            "query and key must be [B, n, H, K] and value [B, n, HV, V], got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    batch, rows, num_k_heads, k_dim = query.shape
    num_v_heads, v_dim = value.shape[2:]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(
            f"A block must have 1 to {MAX_ROWS} rows, got {rows}. Prefill longer inputs with the chunked rule."
        )
    if num_v_heads % num_k_heads:
        raise ValueError(f"The value heads must be a multiple of the {num_k_heads} key heads, got {num_v_heads}.")
    if value.dtype not in ACTIVATION_DTYPES or query.dtype != value.dtype or key.dtype != value.dtype:
        raise ValueError(
            "query, key and value must share one dtype of fp32, bf16 and fp16, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}."
        )
    _check_tensor("log_decay", log_decay, (batch, rows, num_v_heads), torch.float32)
    _check_tensor("beta", beta, (batch, rows, num_v_heads), beta.dtype)
    _check_tensor("recurrent_state", recurrent_state, (batch, num_v_heads, k_dim, v_dim), torch.float32)
    _check_factors(factors, (batch, max(rows, factors.z.shape[1])), (num_k_heads, k_dim), (num_v_heads, v_dim))


def _check_commit(recurrent_states, factors, commit_length) -> None:
    if recurrent_states.dim() != 5 or recurrent_states.dtype != torch.float32:
        raise ValueError(
            "recurrent_states must be fp32 [L, B, HV, K, V], got "
            f"{recurrent_states.dtype} {tuple(recurrent_states.shape)}. Stack the layers in dimension 0."
        )
    layers, batch, num_v_heads, k_dim, v_dim = recurrent_states.shape
    if factors.k.dim() != 5 or factors.k.shape[3] == 0 or num_v_heads % factors.k.shape[3]:
        raise ValueError(
            f"factors.k must be [L, B, N, H, K] with {num_v_heads} a multiple of H, got {tuple(factors.k.shape)}."
        )
    rows, num_k_heads = factors.k.shape[2:4]
    _check_factors(factors, (layers, batch, rows), (num_k_heads, k_dim), (num_v_heads, v_dim))
    if rows > MAX_ROWS:
        raise ValueError(f"A block must have at most {MAX_ROWS} rows, got factors of {rows}.")
    if isinstance(commit_length, torch.Tensor):
        if commit_length.numel() != 1 or commit_length.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "A commit_length on the device must be one int32 or int64 element, got "
                f"{commit_length.dtype} {tuple(commit_length.shape)}."
            )
    elif not 0 <= commit_length <= rows:
        raise ValueError(f"commit_length must be in [0, {rows}], the rows of the block, got {commit_length}.")


def _check_factors(factors: CompactFactors, leading: tuple, k_shape: tuple, v_shape: tuple) -> None:
    _check_tensor("factors.z", factors.z, (*leading, *v_shape), torch.float32)
    _check_tensor("factors.k", factors.k, (*leading, *k_shape), torch.float32)
    _check_tensor("factors.g", factors.g, (*leading, v_shape[0]), torch.float32)


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple, dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}.")
