"""Device rounds, run eagerly: token for token what decode() emits, greedy and with equal uniforms, at every length."""

import pytest
import torch
from transformers import LogitsProcessorList, set_seed
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_hybridspec import Full, HybridCache, Static
from hf_hybridspec.generation.adaptive_policies import DCut, Evict, HybridSpec, NominalOnly
from hf_hybridspec.generation.device_round import (
    NUM_RECORDS,
    GreedyAcceptance,
    Mailbox,
    SampledAcceptance,
    run_program,
)
from hf_hybridspec.generation.draft_session import DraftSession
from hf_hybridspec.generation.verification import TokenVerifier
from hf_hybridspec.kernels.round_steps import RoundState
from hf_hybridspec.modeling.split_forward import SplitForward
from hf_hybridspec.modeling.taps import Taps
from hf_hybridspec.modeling.target import input_embedding, text_model
from tests.generation.stepped_parts import stepped_round
from tests.profiles import noisy_drafter, profile_of
from tests.scenarios import assisted, scripted
from tests.support import MASK_TOKEN_ID

NUM_NEW = 60
PROMPT_LENGTH = 9
# Every acceptance count of a block of 16, in an order that leaves no two neighbours alike.
EVERY_COUNT = (0, 15, 1, 14, 2, 13, 3, 12, 4, 11, 5, 10, 6, 9, 7, 8)


class Sequence:
    """A prefilled sequence of a pair, ready for device rounds."""

    @torch.no_grad()
    def __init__(self, pair, drafter, verifier: TokenVerifier | None = None, cache=None, prompt=None, remaining=None):
        model = pair.attached
        drafter.bind(input_embedding(model), model.get_output_embeddings(), model.config)
        self.cache = HybridCache(model.config) if cache is None else cache
        session = DraftSession(drafter, self.cache, 0)
        prompt = pair.prompt if prompt is None else prompt
        with Taps(text_model(model), drafter.target_layer_ids, session.observe):
            logits = model(prompt[:, self.cache.committed_length :], cache=self.cache).logits
        verifier = TokenVerifier(LogitsProcessorList(), False) if verifier is None else verifier
        first = verifier.verify(prompt, prompt.new_empty(0), logits[0, -1:])
        self.tokens = first.tokens.tolist()
        forward = SplitForward(text_model(model), model.lm_head, drafter.target_layer_ids)
        self.round = stepped_round(forward, self.cache, session)
        self.remaining = NUM_NEW - 1 if remaining is None else remaining
        self.records = []

    @torch.no_grad()
    def run(self, program, stop_tokens=()) -> list[int]:
        """Runs the program until the sequence ends; returns all new tokens."""
        self.round.start(self.tokens[-1], self.remaining, list(stop_tokens), 0)
        while not self.records or not self.records[-1].has_ended:
            run_program(program)
            self.records.append(self.round.mailbox.read(len(self.records) + 1))
            self.tokens += self.records[-1].tokens
        return self.tokens

    @property
    def lengths(self) -> list[int]:
        return [record.length for record in self.records]


def expected_of(pair, num_new=NUM_NEW) -> list[int]:
    return pair.reference[0, PROMPT_LENGTH : PROMPT_LENGTH + num_new].tolist()


def test_every_acceptance_count_on_every_class(pair):
    sequence = Sequence(pair, scripted(pair.reference, EVERY_COUNT), remaining=149)
    tokens = sequence.run(sequence.round.drafting_program(Full(), GreedyAcceptance()))
    assert tokens == expected_of(pair, 150)
    assert {len(record.tokens) for record in sequence.records} >= set(range(1, 17))
    # Committed is all but the newest token.
    assert sequence.cache.committed_length == PROMPT_LENGTH + 149


@pytest.mark.parametrize("length", range(2, 17))
def test_every_static_length(length, target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    sequence = Sequence(pair, scripted(pair.reference, [15, 0, *range(length), 15]))
    assert sequence.run(sequence.round.drafting_program(Static(length), GreedyAcceptance())) == expected_of(pair)
    assert sequence.lengths[0] == length and max(sequence.lengths) == length
    statistics = eager_statistics(pair, scripted(pair.reference, [15, 0, *range(length), 15]), Static(length))
    assert sequence.lengths == statistics.verification_lengths


def eager_statistics(pair, drafter, policy, **options):
    assisted(
        pair.attached, pair.prompt, drafter, "round", max_new_tokens=NUM_NEW, length_policy=policy, **options
    )  # fmt: skip
    return pair.attached.generation_statistics


@pytest.mark.parametrize("policy_class", [HybridSpec, NominalOnly, DCut, Evict])
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_5"])
def test_a_policy_decides_as_in_the_eager_loop(policy_class, kind, target_pairs):
    """Round for round: nominal length, routing correction and emitted tokens; with experts and without."""
    pair = target_pairs[kind]
    continuation = pair.reference[0]

    def policy_for(drafter):
        drafter.bind(input_embedding(pair.attached), pair.attached.get_output_embeddings(), pair.attached.config)
        return policy_class(profile_of(pair.attached, drafter), is_guarded=False)

    drafter = noisy_drafter(continuation)
    policy = policy_for(drafter)
    assert policy.decides_on_device
    sequence = Sequence(pair, drafter)
    assert sequence.run(sequence.round.drafting_program(policy, GreedyAcceptance())) == expected_of(pair)
    drafter = noisy_drafter(continuation)
    statistics = eager_statistics(pair, drafter, policy_for(drafter))
    assert sequence.lengths == statistics.verification_lengths
    assert [len(record.tokens) for record in sequence.records] == statistics.emitted
    if policy_class in (HybridSpec, Evict):
        assert len(set(sequence.lengths[:-3])) > 2
    if policy_class is HybridSpec:
        assert [record.stage0_length for record in sequence.records] != sequence.lengths


# The host's warpers, the settings on the device, the options of generate().
SAMPLING = {
    "sampled": ([TemperatureLogitsWarper(0.7)], (0.7, 1000, 1.0, 0.0), {"temperature": 0.7, "top_k": 0}),
    "filtered": (
        [TemperatureLogitsWarper(1.3), TopKLogitsWarper(70), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
        (1.3, 70, 0.9, 0.02),
        {"temperature": 1.3, "top_k": 70, "top_p": 0.9, "min_p": 0.02},
    ),
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_sampling_with_equal_uniforms(kind, target_pairs):
    """The same seed: decode() with the host's warpers, and device rounds with settings on the device."""
    pair = target_pairs["qwen3_5_moe"]
    warpers, settings, options = SAMPLING[kind]
    for seed in range(2):
        # Making a drafter seeds the global generator.
        drafters = scripted(pair.reference), scripted(pair.reference)
        set_seed(seed)
        output = assisted(
            pair.attached, pair.prompt, drafters[0], "round", max_new_tokens=NUM_NEW, do_sample=True, **options
        )
        set_seed(seed)
        verifier = TokenVerifier(LogitsProcessorList(warpers), True)
        sequence = Sequence(pair, drafters[1], verifier)
        acceptance = SampledAcceptance(torch.device("cpu"), kind == "filtered")
        acceptance.seed.fill_(verifier.uniforms.seed), acceptance.settings.set(*settings)
        assert acceptance.kind == kind
        tokens = sequence.run(sequence.round.drafting_program(Full(), acceptance))
        assert tokens == output[0, PROMPT_LENGTH:].tolist()
        assert tokens != expected_of(pair)


def test_plain_rounds_and_drafting_ones_mix(target_pairs):
    """A pause of the drafter: its context goes on in rounds of one row."""
    pair = target_pairs["qwen3_next"]
    sequence = Sequence(pair, scripted(pair.reference, [3, 5, 2]))
    acceptance = GreedyAcceptance()
    programs = [sequence.round.drafting_program(Full(), acceptance), sequence.round.plain_program(acceptance)]
    sequence.round.start(sequence.tokens[-1], 20, [], 0)
    for turn in (0, 1, 1, 0, 1, 0, 0):
        with torch.no_grad():
            run_program(programs[turn])
        sequence.records.append(sequence.round.mailbox.read(len(sequence.records) + 1))
        sequence.tokens += sequence.records[-1].tokens
    assert [len(record.tokens) for record in sequence.records] == [4, 1, 1, 6, 1, 3, 4]
    assert sequence.lengths[1:3] == [1, 1]
    assert sequence.tokens == expected_of(pair, 21)
    # The drafter itself checks that it has seen every committed row when it proposes.
    assert sequence.records[-1].has_ended


@pytest.mark.parametrize("place", [0, 1, 6, 17, 18])
def test_a_stop_token_ends_the_sequence_at_once(target_pairs, place):
    pair = target_pairs["qwen3_5_moe"]
    expected = expected_of(pair)
    stop = expected[1 + place]
    sequence = Sequence(pair, scripted(pair.reference, [4, 15, 2]))
    tokens = sequence.run(
        sequence.round.drafting_program(Full(), GreedyAcceptance()), stop_tokens=[MASK_TOKEN_ID, stop]
    )
    assert tokens == expected[: expected.index(stop, 1) + 1]
    assert sequence.cache.committed_length == PROMPT_LENGTH + len(tokens) - 1


@pytest.mark.parametrize("remaining", [1, 2, 3, 15, 16, 17])
def test_the_limit_is_met_exactly_and_later_rounds_change_nothing(target_pairs, remaining):
    pair = target_pairs["qwen3_5_moe"]
    sequence = Sequence(pair, scripted(pair.reference, [15]), remaining=remaining)
    program = sequence.round.drafting_program(Full(), GreedyAcceptance())
    assert sequence.run(program) == expected_of(pair, remaining + 1)
    before = [tensor.clone() for tensor in vars(sequence.round.state).values()]
    committed = sequence.cache.committed_length
    for ahead in (program, sequence.round.plain_program(GreedyAcceptance())):
        run_program(ahead)
    assert sequence.cache.committed_length == committed == PROMPT_LENGTH + remaining
    assert all(torch.equal(old, new) for old, new in zip(before, vars(sequence.round.state).values(), strict=True))
    assert sequence.round.mailbox.read(len(sequence.records) + 1) is None


def test_the_host_may_commit_less_than_was_accepted(target_pairs):
    """Verify and commit apart: what a stop string cuts off is in no cache, and decoding goes on from there."""
    pair = target_pairs["qwen3_5_moe"]
    drafter = scripted(pair.reference, [6, 3])
    sequence = Sequence(pair, drafter)
    rounds, acceptance = sequence.round, GreedyAcceptance()
    verify = rounds.drafting_program(Full(), acceptance, commits=False)
    with torch.no_grad():
        rounds.start(sequence.tokens[-1], NUM_NEW, [], 0)
        run_program(verify)
        run_program(rounds.commit_program(rounds.mailbox.read(1).length, acceptance))
        assert sequence.cache.committed_length == PROMPT_LENGTH + 7
        run_program(verify)
        assert sequence.cache.block_length == 16
        rounds.state.commit_length.fill_(2)
        run_program(rounds.commit_program(rounds.mailbox.read(2).length, acceptance))
    assert sequence.cache.committed_length == PROMPT_LENGTH + 9
    # Ten new tokens are known, of which nine are in the cache.
    prompt = pair.reference[:, : PROMPT_LENGTH + 10]
    going_on = Sequence(pair, drafter, cache=sequence.cache, prompt=prompt, remaining=9)
    program = going_on.round.drafting_program(Full(), acceptance)
    assert going_on.run(program) == pair.reference[0, PROMPT_LENGTH + 10 : PROMPT_LENGTH + 20].tolist()


def test_a_cache_serves_two_sequences_of_two_models(target_pairs):
    """Rounds of two models take turns; then the first goes on with a longer prompt on its cache."""
    pairs = [target_pairs[kind] for kind in ("qwen3_5_moe", "qwen3_5")]
    drafters = [scripted(pair.reference, [3, 9, 0]) for pair in pairs]
    sequences = [Sequence(pair, drafter) for pair, drafter in zip(pairs, drafters, strict=True)]
    programs = [each.round.drafting_program(Static(5), GreedyAcceptance()) for each in sequences]
    for sequence in sequences:
        sequence.round.start(sequence.tokens[-1], 19, [], 0)
    with torch.no_grad():
        for _ in range(19):
            for sequence, program in zip(sequences, programs, strict=True):
                run_program(program)
                if record := sequence.round.mailbox.read(len(sequence.records) + 1):
                    sequence.records.append(record)
                    sequence.tokens += record.tokens
    for pair, sequence in zip(pairs, sequences, strict=True):
        assert sequence.tokens == expected_of(pair, 20)
    pair, prompt = pairs[0], pairs[0].reference[:, : PROMPT_LENGTH + 25]
    again = Sequence(pair, drafters[0], cache=sequences[0].cache, prompt=prompt)
    program = again.round.drafting_program(Full(), GreedyAcceptance())
    assert again.run(program) == pair.reference[0, PROMPT_LENGTH + 25 : PROMPT_LENGTH + 25 + NUM_NEW].tolist()


def test_a_record_seen_half_copied_is_not_read():
    state = RoundState.new(NUM_RECORDS, 1, "cpu")
    mailbox = Mailbox(state)
    number = NUM_RECORDS + 3
    state.records[2] = torch.arange(17) + (number << 32)
    state.records[2, 0] = (number << 32) + 4 + (5 << 8) + (2 << 16) + (1 << 24)
    mailbox.publish(state)
    record = mailbox.read(number)
    assert (record.length, record.stage0_length, record.tokens, record.has_ended) == (4, 5, [1, 2], True)
    assert mailbox.read(3) is None and mailbox.read(number + 1) is None
    for torn in range(17):
        mailbox.publish(state)
        mailbox._records[2, torn] -= NUM_RECORDS << 32
        assert mailbox.read(number) is None
    mailbox.clear()
    assert mailbox.read(number) is None


class Overridden(HybridSpec):
    """Changes the host's decision alone."""

    def correct(self, nominal_length, new_experts):
        return nominal_length


def test_a_policy_changed_for_the_host_alone_stays_there():
    assert not Overridden.decides_on_device.fget(Overridden.__new__(Overridden))
    assert Static(5).decides_on_device and Full().decides_on_device
    assert Static(5).key == Static(5).key != Static(6).key
