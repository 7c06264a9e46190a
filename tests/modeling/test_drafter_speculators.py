"""The speculators layout: taps, vocabulary, window, alignment and causality."""

import pytest

from hf_hybridspec.modeling.drafter_config import SAME_POSITION, SHIFTED, AttentionSpan

from .published_examples import load, speculators


def test_speculators_taps_vocabulary_and_window():
    config = load(speculators())
    assert config.target_layer_ids == [1, 9, 19, 29, 36]
    assert config.draft_vocab_size == 32000 and config.head_dim == 256
    assert config.attention_spans[0] == AttentionSpan(True, 2048, window_from_anchor=True)
    assert load(speculators(draft_vocab_size=248320)).draft_vocab_size is None
    assert load(speculators(sliding_window_non_causal=True)).attention_spans[0].causal is False


def test_speculators_alignment():
    assert load(speculators()).alignment == SHIFTED
    fewer = {"proposal_methods": [{"speculative_tokens": 7}]}
    assert load(speculators(speculators_config=fewer)).alignment == SAME_POSITION
    assert load(speculators(sample_from_anchor=False)).alignment == SAME_POSITION
    assert load(speculators("dflash")).alignment == SAME_POSITION
    assert load(speculators("dflash", sample_from_anchor=True)).alignment == SHIFTED
    assert load(speculators(sample_from_anchor=False)).block_size == 8
    with pytest.raises(ValueError, match="needs sample_from_anchor"):
        load(speculators(speculators_config={}))
    assert load(speculators(speculators_config={}), sample_from_anchor=True).alignment == SHIFTED


def test_speculators_sliding_causality_must_be_stated():
    raw = speculators()
    del raw["sliding_window_non_causal"]
    with pytest.raises(ValueError, match=r"no sliding_window_non_causal.*is_causal=False"):
        load(raw)
    assert load(raw, is_causal=False).attention_spans[0].causal is False


def test_speculators_without_taps_or_with_another_width_is_refused():
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids"):
        load(speculators(aux_hidden_state_layer_ids=None))
    with pytest.raises(ValueError, match="target_hidden_size 4096 must equal hidden_size 2048"):
        load(speculators(target_hidden_size=4096))
