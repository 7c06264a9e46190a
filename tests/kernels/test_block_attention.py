"""Attention of block rows: reference against the host's layer and plain loops, Triton against the reference."""

import math

import pytest
import torch
from transformers import DynamicCache, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeAttention, Qwen3_5MoeTextRotaryEmbedding

from hf_hybridspec.kernels.block_attention import HeadNorms, attention_inputs, block_attention
from hf_hybridspec.kernels.dispatch import use_kernels

EPS = 1e-6
# fp32 sums of a few hundred products in another order.
TOLERANCE = 2e-5
# Probabilities and outputs are rounded to bf16, values of order one.
BF16_TOLERANCE = 1e-2
# causal, window, window_from_anchor
SPANS = [
    (True, None, False),
    (False, None, False),
    (True, 5, False),
    (False, 5, False),
    (False, 7, True),
    (True, 200, False),
]
# rows, query heads, key heads, head size
SHAPES = [(1, 4, 2, 16), (3, 8, 2, 16), (16, 6, 1, 24), (5, 3, 3, 32)]
# Lengths around the borders of chunks; with 4 programs a head, 600 lets chunks wrap around.
LENGTHS = (0, 127, 128, 600)


def _cast(device, dtype, *tensors):
    return tuple(tensor.to(device, dtype) for tensor in tensors)


def _block(shape, committed: int, device: str = "cpu", dtype: torch.dtype = torch.float32, spare: int = 40):
    """query, key cache, value cache, committed; NaN where nothing may be read."""
    num_rows, queries, heads, size = shape
    generator = torch.Generator().manual_seed(committed)
    length = committed + 16 + spare
    query = torch.randn(16, queries, size, generator=generator)[:num_rows]
    keys, values = (torch.randn(heads, length, size, generator=generator) for _ in range(2))
    for rows in (keys, values):
        rows[:, committed + num_rows :] = float("nan")
    return *_cast(device, dtype, query, keys, values), torch.tensor([committed], dtype=torch.int32, device=device)


def _naive(query, keys, values, committed, causal, window, from_anchor):
    """One row and head at a time, in float64."""
    query, keys, values, start = query.double(), keys.double(), values.double(), int(committed)
    num_rows, queries, size = query.shape
    output = torch.empty_like(query)
    for row in range(num_rows):
        position = start + row
        seen = []
        for key in range(start + num_rows):
            is_near = window is None or abs(position - key) < window
            if window is not None and from_anchor:
                is_near = key >= start - window
            if is_near and (key <= position or not causal):
                seen.append(key)
        for head in range(queries):
            source = head // (queries // keys.shape[0])
            scores = keys[source, seen] @ query[row, head] / math.sqrt(size)
            output[row, head] = scores.softmax(0) @ values[source, seen]
    return output


def _attend(kind: str, block, span):
    causal, window, from_anchor = span
    with use_kernels(kind):
        return block_attention(*block, block[0].shape[2] ** -0.5, causal, window, from_anchor)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_plain_loops(shape, span):
    for committed in (0, 9):
        block = _block(shape, committed)
        torch.testing.assert_close(
            _attend("reference", block, span).double(), _naive(*block, *span), atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("num_rows", [1, 4])
def test_reference_is_the_host_layer(num_rows):
    config = Qwen3_5MoeTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=32, attn_implementation="eager"
    )
    torch.manual_seed(0)
    layer, rotary = Qwen3_5MoeAttention(config, layer_idx=3), Qwen3_5MoeTextRotaryEmbedding(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, committed = torch.randn(1, 6 + num_rows, 32), 6
    cos, sin = rotary(rows, torch.arange(6 + num_rows)[None])
    cache = DynamicCache(config=config)
    projection = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
    norms = HeadNorms(1 + layer.q_norm.weight, 1 + layer.k_norm.weight, is_gated=True)
    keys, values = torch.full((2, 2, 20, 32), float("nan"))
    with torch.no_grad(), use_kernels("reference"):
        mask = torch.full((6 + num_rows, 6 + num_rows), float("-inf")).triu(1)[None, None]
        expected, _ = layer(rows, (cos, sin), mask, cache)
        for start, stop in ((0, 6), (6, 6 + num_rows)):
            length = torch.tensor([start], dtype=torch.int32)
            projected = rows[0, start:stop] @ projection.T
            rotation = cos[0, start:stop], sin[0, start:stop]
            inputs = attention_inputs(projected, norms, *rotation, keys, values, length, EPS)
        attended = block_attention(inputs.query, keys, values, length, layer.scaling)
        output = (attended * torch.sigmoid(inputs.gate)).flatten(1) @ layer.o_proj.weight.T
    torch.testing.assert_close(keys[:, : 6 + num_rows], cache.layers[3].keys[0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(values[:, : 6 + num_rows], cache.layers[3].values[0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(output, expected[0, committed:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("committed", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_reference(shape, committed, triton_device):
    for span in SPANS if committed == 600 and shape[0] < 16 else SPANS[::2]:
        block = _block(shape, committed, triton_device)
        expected = _attend("reference", block, span)
        torch.testing.assert_close(_attend("triton", block, span), expected, atol=TOLERANCE, rtol=TOLERANCE)


def _projected(num_rows: int, is_gated: bool, device: str, dtype: torch.dtype = torch.float32):
    """Arguments of `attention_inputs` for 4 query and 2 key heads of 20, 12 of them rotated; strided caches."""
    generator = torch.Generator().manual_seed(num_rows)
    columns = 4 * 20 * (2 if is_gated else 1) + 2 * 2 * 20
    projected = torch.randn(num_rows, columns + 3, generator=generator)[:, :columns]
    scales = (1 + 0.3 * torch.randn(20, generator=generator) for _ in range(2))
    norms = HeadNorms(*_cast(device, torch.float32, *scales), is_gated)
    cos, sin = torch.randn(2, num_rows, 12, generator=generator)
    keys, values = torch.zeros(50, 2, 20).transpose(0, 1), torch.zeros(2, 50, 40)[..., :20]
    committed = torch.tensor([21], dtype=torch.int32, device=device)
    projected, cos, sin = _cast(device, dtype, projected, cos, sin)
    return projected, norms, cos, sin, keys.to(device, dtype), values.to(device, dtype), committed


def _check_inputs(num_rows, is_gated, device, dtype, tolerance):
    results = {}
    for kind in ("reference", "triton"):
        arguments = _projected(num_rows, is_gated, device, dtype)
        with use_kernels(kind):
            results[kind] = attention_inputs(*arguments, EPS), *arguments[4:6]
    (expected, *caches), (result, *written) = results["reference"], results["triton"]
    torch.testing.assert_close(result.query, expected.query, atol=tolerance, rtol=tolerance)
    assert (result.gate is None) == (not is_gated)
    if is_gated:
        assert torch.equal(result.gate, expected.gate)
    torch.testing.assert_close(written[0], caches[0], atol=tolerance, rtol=tolerance)
    assert torch.equal(written[1], caches[1])
    assert caches[0][:, 21 : 21 + num_rows].abs().min() > 0 and not caches[0][:, :21].any()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_triton_inputs_equal_reference(num_rows, is_gated, triton_device):
    _check_inputs(num_rows, is_gated, triton_device, torch.float32, 1e-6)


def test_context_rows_need_no_queries(triton_device):
    written = []
    for kind, columns in (("reference", slice(0)), ("reference", slice(80)), ("triton", slice(80))):
        projected, *rest = _projected(3, False, triton_device)
        projected = projected[:, columns.stop :]
        with use_kernels(kind):
            assert attention_inputs(projected, *rest, EPS).query.shape == (3, 4 if columns.stop == 0 else 0, 20)
        written.append(rest[3])
    for keys in written[1:]:
        torch.testing.assert_close(keys, written[0], atol=1e-6, rtol=1e-6)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's bf16 products are wrong")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("num_rows", [1, 16])
def test_triton_inputs_in_bf16_round_as_the_reference(num_rows):
    _check_inputs(num_rows, True, "cuda", torch.bfloat16, 1e-2)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("committed", [0, 100, 2048, 33000])
@pytest.mark.parametrize(("queries", "heads", "size"), [(16, 2, 256), (24, 4, 256), (32, 8, 128)])
def test_triton_is_near_fp32(queries, heads, size, committed, dtype, watches_races):
    spans = SPANS[0], SPANS[1], (True, 2048, False), (False, 2048, True)
    for num_rows in (16,) if watches_races else (1, 2, 3, 6, 8, 16):
        for span in spans[:1] if watches_races and committed > 2048 else spans:
            block = _block((num_rows, queries, heads, size), committed, "cuda", dtype)
            wide = *(tensor.float() for tensor in block[:3]), block[3]
            tolerance = TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
            torch.testing.assert_close(
                _attend("triton", block, span).float(), _attend("reference", wide, span), atol=tolerance, rtol=0.02
            )


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("committed", [0, 127, 2047, 33000])
def test_a_row_does_not_depend_on_the_rows_after_it(committed, watches_races):
    block = _block((16, 16, 2, 256), committed, "cuda", torch.bfloat16)
    query, *rest = block
    expected = _attend("triton", block, SPANS[0])
    for num_rows in (1,) if watches_races else (1, 2, 3, 4, 6, 8, 12):
        assert torch.equal(_attend("triton", (query[:num_rows], *rest), SPANS[0]), expected[:num_rows]), num_rows
    # The same row as the first of a later block: what decoding one by one computes.
    last = torch.tensor([committed + 15], dtype=torch.int32, device="cuda")
    alone = _attend("triton", (query[15:], *rest[:2], last), SPANS[0])
    assert torch.equal(alone, expected[15:])


@pytest.mark.gpu
@gpu
def test_a_captured_launch_follows_the_length_on_the_device():
    block = _block((4, 16, 2, 256), 3000, "cuda", torch.bfloat16)
    query, keys, values, committed = block
    keys, values = keys.nan_to_num(), values.nan_to_num()
    block = query, keys, values, committed
    _attend("triton", block, SPANS[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = _attend("triton", block, SPANS[0])
    for length in (3000, 0, 17, 900, 3000):
        committed.fill_(length)
        graph.replay()
        assert torch.equal(output, _attend("triton", block, SPANS[0])), length
        wide = query.float(), keys.float(), values.float(), committed
        torch.testing.assert_close(
            output.float(), _attend("reference", wide, SPANS[0]), atol=BF16_TOLERANCE, rtol=0.02
        )


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("num_rows", [1, 6, 16])
def test_attention_that_overlaps_sees_the_rows_written_just_before(num_rows):
    _, keys, values, committed = _block((num_rows, 16, 2, 256), 2050, "cuda", torch.bfloat16)
    projected = torch.randn(num_rows, 2 * 16 * 256 + 2 * 2 * 256, device="cuda").bfloat16()
    norms = HeadNorms(*torch.ones(2, 256, device="cuda"), is_gated=True)
    rotation = torch.randn(2, num_rows, 64, device="cuda").bfloat16()

    def run(wait):
        with use_kernels("triton"):
            inputs = attention_inputs(projected, norms, *rotation, keys, values, committed, EPS)
            wait()
            return block_attention(inputs.query, keys, values, committed, 0.0625)

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Twice: the first has the caches warm for the second.
        outputs = [run(lambda: None), run(lambda: None)]
    for start in (0, 31, 1000, 2047, 2050):
        committed.fill_(start)
        for rows in (keys, values):
            rows[:, start:] = float("nan")
        graph.replay()
        torch.cuda.synchronize()
        expected = run(torch.cuda.synchronize)
        assert expected.isfinite().all()
        assert all(torch.equal(output, expected) for output in outputs), start
        for rows in (keys, values):
            rows.normal_()


def test_errors_name_what_is_given_and_allowed():
    query, keys, values, committed = _block((2, 4, 2, 16), 3)
    with pytest.raises(ValueError, match="1 to 16 rows"):
        block_attention(torch.zeros(17, 4, 16), keys, values, committed, 1.0)
    with pytest.raises(ValueError, match="Hq a multiple of 2"):
        block_attention(torch.zeros(2, 3, 16), keys, values, committed, 1.0)
    with pytest.raises(ValueError, match="committed must be"):
        block_attention(query, keys, values, committed.long(), 1.0)
    with pytest.raises(ValueError, match="D contiguous"):
        block_attention(query, keys.transpose(1, 2).contiguous().transpose(1, 2), values, committed, 1.0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        block_attention(query, keys, values, committed, 1.0, window=0)
    projected, norms, cos, sin, *rest = _projected(3, True, "cpu")
    with pytest.raises(ValueError, match="whole query heads of 40"):
        attention_inputs(projected[:, :-20], norms, cos, sin, *rest, EPS)
    with pytest.raises(ValueError, match="R even"):
        attention_inputs(projected, norms, cos[:, :3], sin[:, :3], *rest, EPS)
