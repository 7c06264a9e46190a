"""Our DFlash and DFlash2 against the public `dflash` package on the same random checkpoint."""

import pytest
import torch

from hf_hybridspec.modeling.auto import AutoDrafter

from ..drafter_helpers import FULL, SLIDING, YARN, bind, features, make_drafter

peer = pytest.importorskip("dflash.model")
pytestmark = pytest.mark.peer

# fp32 rounding through three layers: hidden rows are of size 1; logits sum 32 products of them.
HIDDEN_TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
LOGITS_TOLERANCE = {"rtol": 2e-5, "atol": 1e-4}

CASES = {
    "dflash, full and YaRN": ("dflash", {"layer_types": [FULL] * 3, "rope_parameters": dict(YARN)}),
    "dflash, sliding": ("dflash", {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 4}),
    "dflash, bidirectional": ("dflash", {"is_causal": False, "sliding_window": 4}),
    "dflash2": ("dflash2", {"layer_types": [SLIDING] * 3, "sliding_window": 4, "is_causal": False}),
    "dflash2, causal": ("dflash2", {"layer_types": [SLIDING] * 3, "sliding_window": 4, "is_causal": None}),
}


class Peer:
    """The package's model, fed as its own loop feeds it, round by round with its cache."""

    def __init__(self, folder, family):
        classes = {"dflash": peer.DFlashDraftModel, "dflash2": peer.DFlash2DraftModel}
        self.model = classes[family].from_pretrained(folder, dtype=torch.float32).eval()
        self.cache = peer._make_cache(self.model.config)

    @torch.no_grad()
    def hidden(self, new_features, position, rows):
        start = position - new_features.shape[0]
        hidden = self.model(
            target_hidden=new_features.unsqueeze(0),
            noise_embedding=rows,
            position_ids=torch.arange(start, position + rows.shape[1]).unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
        )
        peer._crop_to(self.cache, position)
        return hidden[0]


@pytest.mark.parametrize("case", CASES)
def test_forward_and_drafts_equal_the_peer(case, tmp_path):
    family, changes = CASES[case]
    make_drafter(family, **changes).save_pretrained(tmp_path)
    drafter = bind(AutoDrafter.from_pretrained(tmp_path))
    other, context, position = Peer(tmp_path, family), drafter.new_context(), 0
    for seed, committed in enumerate([13, 1, 3, 5]):
        rows, anchor = features(committed, seed=20 + seed), torch.tensor([seed + 3])
        drafter.observe(context, rows, torch.arange(position, position + committed))
        position += committed
        block = drafter.embed_block(anchor, 5)
        positions = torch.arange(position, position + 5)
        masks = {span: drafter._mask_after(context, span, positions) for span in set(drafter.spans)}
        with torch.no_grad():
            ours = drafter(block, positions, [layer.key_values for layer in context.layers], masks)[0]
            theirs = other.hidden(rows, position, block)
            torch.testing.assert_close(ours, theirs, **HIDDEN_TOLERANCE)
            logits = drafter.logits(ours[1:])
            expected_logits = other.model.compute_logits(theirs[1:], drafter.target.head)
            torch.testing.assert_close(logits, expected_logits, **LOGITS_TOLERANCE)
            draft = drafter.propose(context, anchor, position)
            if family == "dflash":
                expected = logits.index_fill(1, torch.tensor([50]), -torch.inf).argmax(-1)
            else:
                head = _without_mask_token(drafter.target.head)
                expected = other.model.propose(theirs[None, 1:], anchor, head, 0.0)[0][0]
        assert torch.equal(draft.tokens, expected)


def _without_mask_token(head):
    return lambda hidden: head(hidden).index_fill(-1, torch.tensor([50]), -torch.inf)
