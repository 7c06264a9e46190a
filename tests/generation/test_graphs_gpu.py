"""On a GPU: captured rounds equal the same steps one by one, token for token, on the bundled models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.generation.stopping_criteria import StoppingCriteriaList

import hf_hybridspec
from hf_hybridspec import AutoDrafter, HybridCache, Static
from hf_hybridspec.bundled import resolve
from hf_hybridspec.generation import round_engine
from hf_hybridspec.generation.adaptive_policies import DCut, HybridSpec, NominalOnly
from hf_hybridspec.generation.conditional_graphs import conditional_graph_obstacle
from hf_hybridspec.generation.round_graphs import EagerRounds
from hf_hybridspec.modeling.target import input_embedding
from tests.generation.device_helpers import StopAt
from tests.profiles import profile_of

pytestmark = pytest.mark.gpu

PROMPT = "Mia has 12 apples and buys 7 more. She gives 5 to Tom. How many apples does Mia have now?"
NUM_NEW = 120
# Difference of two logits, relative to them, that a few roundings to bf16 explain.
NEAR_TIE = 2.0**-5


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def models(request):
    """The bundled target and drafter on the GPU, in one dtype, and a prompt."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if obstacle := conditional_graph_obstacle(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(obstacle)
    options = {"dtype": getattr(torch, request.param), "device_map": "cuda"}
    target = hf_hybridspec.attach(AutoModelForCausalLM.from_pretrained(resolve("tiny"), **options)).eval()
    drafter = AutoDrafter.from_pretrained(resolve("tiny-dflash"), **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return target, drafter, {name: tensor.to(target.device) for name, tensor in ids.items()}


@pytest.fixture
def stepwise(monkeypatch):
    """Calls within `with stepwise():` run the steps of a round one by one."""

    class Stepwise:
        def __enter__(self):
            self.patch = pytest.MonkeyPatch()
            self.patch.setattr(round_engine, "RoundGraphs", lambda device: EagerRounds())

        def __exit__(self, *exception):
            self.patch.undo()

    return Stepwise()


def generate(models, **options):
    """New tokens, and the statistics of the call, which must have been captured or stepped on fixed buffers."""
    target, drafter, inputs = models
    defaults = {"max_new_tokens": NUM_NEW, "do_sample": False, "decoding_path": "graphs", "eos_token_id": None}
    options = {"assistant_model": drafter, **inputs, **defaults, **options}
    if options["assistant_model"] is None:
        del options["assistant_model"]
    output = target.generate(**options)
    assert target.generation_statistics.path == options["decoding_path"]
    return output[0, inputs["input_ids"].shape[1] :].tolist(), target.generation_statistics


def both(models, stepwise, **options):
    """The same call captured and stepped, on engines of their own."""
    engines = models[0]._hybridspec.engines.engines
    set_seed(3)
    captured = generate(models, **options)
    kept = list(engines)
    engines.clear()
    with stepwise:
        set_seed(3)
        stepped = generate(models, **options)
    engines[:] = kept
    assert captured[0] == stepped[0]
    assert captured[1].emitted == stepped[1].emitted
    assert captured[1].verification_lengths == stepped[1].verification_lengths
    return captured


@pytest.mark.parametrize("length", range(2, 17))
def test_every_length(models, stepwise, length):
    _, statistics = both(models, stepwise, length_policy=Static(length), max_new_tokens=60)
    assert max(statistics.verification_lengths) == length


@pytest.mark.parametrize("policy_class", [HybridSpec, NominalOnly, DCut])
def test_lengths_chosen_on_the_device(models, stepwise, policy_class):
    target, drafter, _ = models
    drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config)
    policy = policy_class(profile_of(target, drafter), is_guarded=False)
    _, statistics = both(models, stepwise, length_policy=policy)
    assert statistics.acceptance_length > 1.2
    assert len(set(statistics.verification_lengths)) > 1


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8, "top_k": 0}, {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01}]
)
def test_sampling(models, stepwise, options):
    tokens, _ = both(models, stepwise, do_sample=True, length_policy=Static(5), **options)
    set_seed(4)
    assert generate(models, do_sample=True, length_policy=Static(5), **options)[0] != tokens


def test_plain_rounds_equal_drafted_ones(models, stepwise):
    """Greedy and with the same kernels. In bf16 up to the first near-tie, as sums of the GDN solve depend on w."""
    plain, statistics = both(models, stepwise, assistant_model=None)
    assert set(statistics.verification_lengths) == {1}
    drafted, _ = both(models, stepwise, length_policy="full")
    if models[0].dtype == torch.float32:
        assert plain == drafted
    elif plain != drafted:
        assert_near_tie(models, plain, drafted)


def assert_near_tie(models, plain, drafted):
    """The first two tokens that differ are the most probable ones, and no further apart than bf16 can tell."""
    target, _, inputs = models
    first = next(i for i, (one, other) in enumerate(zip(plain, drafted, strict=True)) if one != other)
    before = torch.tensor([plain[:first]], dtype=torch.int64, device=target.device)
    with torch.no_grad():
        logits = target(torch.cat([inputs["input_ids"], before], dim=1), use_cache=False).logits[0, -1].float()
    best, pair = logits.max(), logits[[plain[first], drafted[first]]]
    assert (best - pair).max() <= NEAR_TIE * best.abs()


def test_the_eager_loop_gives_the_same_tokens_in_fp32(models):
    if models[0].dtype != torch.float32:
        pytest.skip("in bf16 equal up to the first near-tie only")
    captured, _ = generate(models, length_policy="full")
    eager, _ = generate(models, length_policy="full", decoding_path="round")
    assert captured == eager


def test_stops_and_a_cache_over_turns(models):
    """EOS, a host criterion and the limit; every turn continues the cache, captured or in the eager loop."""
    target, drafter, inputs = models
    cache = HybridCache(target.config)
    ids, lengths = inputs["input_ids"], []
    reference, _ = generate(models, length_policy="full")
    stops = [
        {"max_new_tokens": 10},
        {"max_new_tokens": 60, "stopping_criteria": StoppingCriteriaList([StopAt(ids.shape[1] + 10 + 7)])},
        {"max_new_tokens": 30, "decoding_path": "round"},
        {"max_new_tokens": 25},
    ]
    for stop in stops:
        options = {"decoding_path": "graphs", "do_sample": False, "eos_token_id": None, **stop}
        # The turn's prompt is the sequence so far and the token that follows it.
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, cache=cache, **options
        )
        assert cache.committed_length == output.shape[1] - 1
        lengths.append(output.shape[1] - ids.shape[1])
        ids = torch.cat([output, output[:, -1:] * 0 + 7], dim=1)
    assert lengths == [10, 6, 30, 25]
    end = reference[8]
    tokens, _ = generate(models, length_policy="full", eos_token_id=[end])
    assert tokens == reference[: reference.index(end) + 1]


def test_two_models_alive(models):
    """Another target with other weights, captured beside the first; both stay right."""
    target, _, inputs = models
    expected, _ = generate(models, length_policy="full")
    other = hf_hybridspec.attach(
        AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=target.dtype, device_map="cuda")
    ).eval()
    with torch.no_grad():
        other.model.norm.weight.mul_(0.5)
    pair = (other, AutoDrafter.from_pretrained(resolve("tiny-dflash"), dtype=target.dtype, device_map="cuda"), inputs)
    changed, _ = generate(pair, length_policy="full")
    assert generate(models, length_policy="full")[0] == expected
    assert generate(pair, length_policy="full")[0] == changed


def test_a_streamer_hears_rounds_as_they_end(models):
    heard = []

    class Listener:
        def put(self, tokens):
            heard.append(tokens.flatten().tolist())

        def end(self):
            heard.append("end")

    tokens, statistics = generate(models, length_policy="full", streamer=Listener())
    # The prompt, the prefill's token, one put a round.
    assert len(heard) == 3 + statistics.rounds and heard[-1] == "end"
    assert [token for put in heard[1:-1] for token in put] == tokens
