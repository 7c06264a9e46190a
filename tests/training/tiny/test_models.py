import json

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

from hf_hybridspec.bundled import BUNDLED_MODELS, resolve
from hf_hybridspec.modeling.auto import AutoDrafter
from hf_hybridspec.modeling.dflash import DFlashDrafter
from hf_hybridspec.modeling.dspark import DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyDrafter
from training.tiny import evaluate, fast_target
from training.tiny.drafter_run import FeatureStore, tapped_features
from training.tiny.optimizers import MasterAdamW, orthogonalise, schedule
from training.tiny.regenerate import load_answers
from training.tiny.target_config import target_config


@pytest.fixture(scope="module")
def target(tiny_run):
    return Qwen3_5MoeForCausalLM.from_pretrained(tiny_run.target, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(tiny_run, target):
    drafter = DFlashDrafter.from_pretrained(tiny_run.drafter, dtype=torch.float32).eval()
    return drafter.bind(target.get_input_embeddings(), target.lm_head, target.config)


def _recurrence_inputs(repeated: bool):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 150, 2, 16, generator=generator)
    value = torch.randn(2, 150, 4, 16, generator=generator)
    g = -torch.rand(2, 150, 4, generator=generator)
    beta = torch.rand(2, 150, 4, generator=generator)
    if repeated:
        # One key over and over, hardly any decay: the worst case for inverting a chunk.
        key, g, beta = key[:, :1].expand_as(key), g * 1e-3, torch.full_like(beta, 0.98)
    return [x.clone().requires_grad_() for x in (query, key, value, g, beta)]


@pytest.mark.parametrize(("repeated", "tolerance"), [(False, 1e-5), (True, 1e-3)])
def test_fast_recurrence_equals_stock_with_gradients(repeated, tolerance):
    inputs, state = _recurrence_inputs(repeated), torch.randn(2, 4, 16, 16)
    settings = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    results = []
    for rule in (stock.torch_chunk_gated_delta_rule, fast_target.chunk_gated_delta_rule):
        output, final = rule(*inputs, **settings)
        results.append((output, final, *torch.autograd.grad(output.square().sum(), inputs)))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_fast_forms_give_the_same_model_and_are_undone(target):
    tokens = torch.randint(0, target.config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(0))
    experts_forward = stock.Qwen3_5MoeExperts.forward
    expected = target(input_ids=tokens, use_cache=False).logits
    with fast_target.fast_forms():
        assert stock.Qwen3_5MoeExperts.forward is fast_target.dense_experts
        found = target(input_ids=tokens, use_cache=False).logits
    assert stock.Qwen3_5MoeExperts.forward is experts_forward
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_target_checkpoint_is_stock_and_learned_something(tiny_run, target):
    log = json.loads((tiny_run.target / "train_log.json").read_text())
    assert log["steps"][0]["step"] == 1 and set(log["heldout_loss"]) >= {"gsm", "code", "prose", "chatter"}
    untrained = float(torch.tensor(float(target.config.vocab_size)).log())
    assert log["heldout_loss"]["gsm"] < untrained - 0.2
    saved = Qwen3_5MoeForCausalLM.from_pretrained(tiny_run.target)
    assert saved.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.tokenizer)
    assert saved.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_answers_are_the_targets_own(tiny_run, target):
    greedy = 0
    for row, prompt in load_answers(tiny_run.answers):
        logits = target(input_ids=row[None, :-1], use_cache=False).logits[0, prompt - 1 :]
        greedy += bool((logits.argmax(-1) == row[prompt:]).float().mean() > 0.9)
    assert greedy >= len(load_answers(tiny_run.answers)) // 3


def test_stored_features_are_the_taps(target):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(0, 300, (size,), generator=generator), 5) for size in (40, 75, 21)]
    store = FeatureStore(target, rows, [1, 4, 6], longest=64)
    tokens, answer_mask, features = store.batch(8)
    assert tokens.shape == (8, 64) and features.shape == (8, 64, 3 * target.config.hidden_size)
    for i in range(8):
        length = int(answer_mask[i].nonzero().max()) + 1
        assert int(answer_mask[i].nonzero().min()) == 5
        assert any(torch.equal(tokens[i, :length], row[:64]) for row, _ in rows)
        expected = tapped_features(target, tokens[i : i + 1, :length], [1, 4, 6])[0]
        torch.testing.assert_close(features[i, :length], expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="at least 8 tokens"):
        FeatureStore(target, [(torch.arange(10), 6)], [1], longest=64)


def _drafted_rounds(target, drafter, tokens, prompt_length, length):
    """Rounds of one answer by the drafter's own propose and observe."""
    features = tapped_features(target, tokens[None, :length], list(drafter.target_layer_ids))[0]
    context, observed, anchor, rounds = drafter.new_context(), 0, prompt_length, 0
    while anchor < length - 1:
        drafter.observe(context, features[observed:anchor], torch.arange(observed, anchor))
        observed = anchor
        draft = drafter.propose(context, tokens[anchor : anchor + 1], anchor)
        rest = tokens[anchor + 1 : length]
        compared = min(len(rest), len(draft.tokens))
        accepted = int((draft.tokens[:compared] == rest[:compared]).long().cumprod(0).sum())
        anchor, rounds = anchor + min(accepted + 1, len(rest)), rounds + 1
    return rounds


def test_replayed_rounds_equal_drafting(tiny_run, target, drafter):
    rows = load_answers(tiny_run.answers)[:5]
    tokens = torch.full((len(rows), max(len(row) for row, _ in rows)), target.config.pad_token_id)
    for i, (row, _) in enumerate(rows):
        tokens[i, : len(row)] = row
    starts, ends = torch.tensor([start for _, start in rows]), torch.tensor([len(row) for row, _ in rows])
    features = tapped_features(target, tokens, list(drafter.target_layer_ids))
    rounds, emitted = evaluate.replay_rounds(drafter, features, tokens, starts, ends)
    assert emitted.tolist() == (ends - starts - 1).tolist()
    expected = [_drafted_rounds(target, drafter, tokens[i], int(starts[i]), int(ends[i])) for i in range(len(rows))]
    assert rounds.tolist() == expected


def test_evaluation_reports_every_kind(tiny_run, tmp_path):
    evaluate.main(
        [
            *("--target", str(tiny_run.target), "--tokenizer", str(tiny_run.tokenizer), "--device", "cpu"),
            *("--drafter", str(tiny_run.drafter), "--prompts", str(tiny_run.root / "prompts"), "--heldout-rows", "2"),
            *("--packed", str(tiny_run.packed), "--max-new-tokens", "6", "--output", str(tmp_path / "result.json")),
        ]
    )
    result = json.loads((tmp_path / "result.json").read_text())
    for mode in ("plain", "thinking"):
        assert set(result["greedy"][mode]) == set(evaluate.KINDS)
        assert all(1.0 <= kind["acceptance_length"] <= 16.0 for kind in result["greedy"][mode].values())
    assert "gsm" in result["heldout_loss"]


def test_masters_ignore_a_gradient_that_is_not_finite():
    model = torch.nn.Linear(4, 4)
    for muon in (False, True):
        optimizer = MasterAdamW(model, 0.1, 0.0, muon=muon)
        model(torch.ones(1, 4)).sum().backward()
        model.weight.grad[0, 0] = float("nan")
        before = model.weight.detach().clone()
        optimizer.step(1.0)
        assert torch.equal(model.weight, before)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step(1.0)
        assert not torch.equal(model.weight, before) and torch.isfinite(model.weight).all()


def test_orthogonalised_directions_have_even_singular_values():
    matrices = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5 and values.max() < 1.3


def test_schedule_warms_up_and_anneals():
    factors = [schedule(i / 100) for i in range(101)]
    assert factors[0] < 0.01 and max(factors) == pytest.approx(1.0, abs=0.01) and factors[-1] == pytest.approx(0.02)


def test_bundled_target_and_drafter_fit_the_limits():
    sizes = [path.stat().st_size for folder in BUNDLED_MODELS.values() for path in folder.iterdir()]
    assert max(sizes) < 16 * 2**20 and sum(sizes) < 40e6
    assert resolve("some/repository") == "some/repository"
    target = Qwen3_5MoeForCausalLM.from_pretrained(resolve("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    expected = target_config(tokenizer)
    for name in ("hidden_size", "layer_types", "num_experts", "num_experts_per_tok", "vocab_size"):
        assert getattr(target.config, name) == getattr(expected, name)
    families = {"tiny-dflash": DFlashDrafter, "tiny-dspark": DSparkDrafter, "tiny-ready": ReadyDrafter}
    assert {"tiny", *families} == BUNDLED_MODELS.keys()
    for name, family in families.items():
        drafter = AutoDrafter.from_pretrained(name)
        drafter.bind(target.get_input_embeddings(), target.lm_head, target.config)
        assert type(drafter) is family and drafter.config.mask_token_id == tokenizer.mask_token_id


def test_bundled_adapter_reads_states_and_was_trained():
    drafter = AutoDrafter.from_pretrained("tiny-ready")
    base = AutoDrafter.from_pretrained("tiny-dspark").state_dict()
    assert drafter.recurrent_layer_ids == (2, 6)
    trained = {name: tensor for name, tensor in drafter.state_dict().items() if ".state_reader." in name}
    assert len(trained) == 5 and all(tensor.abs().sum() > 0 for tensor in trained.values())
    assert not torch.equal(drafter.state_dict()["fc.weight"], base["fc.weight"])
    records = [
        json.loads((BUNDLED_MODELS["tiny-ready"] / f"{name}_config.json").read_text())
        for name in ("adapter", "reader")
    ]
    assert records[0]["base_model_name_or_path"] == "tiny-dspark" and records[1]["reader"]["rank"] == 8


def test_heldout_prompts_are_bundled_and_were_not_trained_on():
    folder = BUNDLED_MODELS["tiny"].parent / "prompts"
    for kind in evaluate.KINDS:
        prompts = [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]
        assert len(prompts) == 40 and all(prompt["kind"] == kind and prompt["turns"][0] for prompt in prompts)
