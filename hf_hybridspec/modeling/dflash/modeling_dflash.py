"""DFlash, and DFlash2 with its convolutions and candidate selector."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ..draft import Draft
from ..drafter import Drafter
from ..drafter_config import DrafterConfig
from ..drafter_layers import BlockInput, DrafterLayer
from .configuration_dflash import DFlash2Config, DFlashConfig


class DFlashDrafter(Drafter):
    """DFlash: one bidirectional (or causal, in sliding layers) pass fills the whole block; rows are independent given
    it, and each draft token is its row's top-1."""

    config_class = DFlashConfig

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.post_init()

    @classmethod
    def adapt_config(cls, config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
        if any(name.startswith("markov_head.") for name in shapes):
            raise ValueError(
                "This DFlashDraftModel checkpoint has a Markov head that its config.json does not mention, so its row "
                "alignment is unknown. Add markov_rank and sample_from_anchor to its config.json."
            )
        return config


class BlockConvolution(nn.Module):
    """Causal convolution over the rows of a block whose taps are a base kernel plus a projection of the input.

    Side 0 is applied to a sublayer's input, side 1 to its output; both read their dynamic taps from the input.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def dynamic_taps(self, x: Tensor) -> Tensor:
        """x [1, R, H] -> [R, 2, taps, groups]."""
        return self.kernel_projection(x).view(x.shape[1], 2, self.taps, -1)

    def convolve(self, x: Tensor, dynamic: Tensor, side: int, rows_per_block: int) -> Tensor:
        """y[t] = sum_o (base[o] + dynamic[t, o]) * x[t - o] within each block, x [1, R, H], zero before a block."""
        blocks = x.view(-1, rows_per_block, x.shape[-1])
        output = torch.zeros_like(blocks)
        for offset in range(self.taps):
            past = F.pad(blocks, (0, 0, offset, 0))[:, :rows_per_block]
            taps = dynamic[:, side, offset].repeat_interleave(self.group_size, dim=-1).view_as(blocks)
            output = output + (self.base_kernel[side, offset] + taps) * past
        return output.view_as(x)


class DFlash2Layer(DrafterLayer):
    def __init__(self, config: DFlash2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def attend(self, x: Tensor, block: BlockInput) -> Tensor:
        dynamic = self.attention_conv.dynamic_taps(x)
        x = self.attention_conv.convolve(x, dynamic, 0, block.rows_per_block)
        return self.attention_conv.convolve(super().attend(x, block), dynamic, 1, block.rows_per_block)

    def feed_forward(self, x: Tensor, block: BlockInput) -> Tensor:
        dynamic = self.mlp_conv.dynamic_taps(x)
        x = self.mlp_conv.convolve(x, dynamic, 0, block.rows_per_block)
        return self.mlp_conv.convolve(super().feed_forward(x, block), dynamic, 1, block.rows_per_block)


class CandidateSelector(nn.Module):
    """Scores each row's top candidates by how well they follow the token chosen before.

    score(c) = logit(c) + <predecessor[previous] * (P h), successor[c]>.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor, logits: Tensor) -> Tensor:
        """Scores [.., C] fp32 of candidates [.., C] (their logits [.., C]) after previous [..] at hidden [.., H]."""
        wanted = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return logits + torch.einsum("...r,...cr->...c", wanted, self.successor_codebook[candidates])


class DFlash2Drafter(Drafter):
    """DFlash2; draft tokens are chosen left to right by the candidate selector.

    Confidence and entropy are of the selector's distribution over a row's candidates.
    """

    config_class = DFlash2Config
    layer_class = DFlash2Layer

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def choose(self, hidden: Tensor, anchor: Tensor) -> Draft:
        logits, candidates = self.proposal_logits(hidden).topk(
            min(self.candidate_selector.top_k, self.config.vocab_size)
        )
        previous, columns, scores = anchor, [], []
        for row in range(hidden.shape[0]):
            scores.append(self.candidate_selector(hidden[row], previous[0], candidates[row], logits[row]))
            columns.append(scores[-1].argmax(-1, keepdim=True))
            previous = candidates[row, columns[-1]]
        columns = torch.cat(columns)
        tokens = candidates.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
        return Draft.of(tokens, columns, torch.stack(scores))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, BlockConvolution):
            # A fresh convolution passes its input through.
            kernel = torch.zeros(module.base_kernel.shape)
            kernel[:, 0] = 1.0
            init.copy_(module.base_kernel, kernel)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=std)
            init.normal_(module.successor_codebook, std=std)
