"""The walked rounds are those of generate(), round by round."""

import pytest
import torch

from hf_hybridspec.generation.attach import attach
from hf_hybridspec.generation.length_policies import Full
from tests.support import random_prompt
from tests.training.helpers import make_pair
from training.target_features import FrozenTarget
from training.walk import walk


@pytest.mark.parametrize("family", ["dspark", "ready"])
@pytest.mark.parametrize("end", [None, 20])
def test_walked_rounds_equal_generated_ones(family, end):
    target, drafter = make_pair(family)
    learn(drafter, target)
    attach(target)
    prompt = random_prompt(9)
    target.generation_config.eos_token_id = None
    plain = target.generate(prompt, max_new_tokens=36, do_sample=False)
    eos = None if end is None else int(plain[0, 9 + end])
    settings = {"eos_token_id": eos} if eos is not None else {}
    output = target.generate(
        prompt, assistant_model=drafter, max_new_tokens=36, do_sample=False, length_policy=Full(),
        return_dict_in_generate=True, **settings,
    )  # fmt: skip
    tokens = output.sequences[0]
    ended = eos is not None and int(tokens[-1]) == eos
    found = walk(drafter, FrozenTarget(target, drafter), tokens, 9, ended)
    assert found.emitted == output.statistics.emitted
    assert found.verification_lengths == output.statistics.verification_lengths
    assert max(found.emitted) > 1


def learn(drafter, target):
    """A Markov head that knows the target's favourite successors, so that rounds differ in length."""
    with torch.no_grad():
        text = target.generate(random_prompt(9), max_new_tokens=36, do_sample=False, eos_token_id=None)[0]
        head = drafter.markov_head
        head.markov_w1.weight.zero_()
        head.markov_w2.weight.zero_()
        seen = text[9:40].unique()[:8]
        for index, token in enumerate(seen):
            where = (text[9:-1] == token).nonzero()[0, 0] + 9
            head.markov_w1.weight[token, index] = 1
            head.markov_w2.weight[text[where + 1], index] = 1000
