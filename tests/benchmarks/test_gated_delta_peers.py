"""Kernels of other engines: loading them leaves no trace, and each computes what ours does.

HF_HYBRIDSPEC_PEERS names the folder with the real files; they run in fp32 through Triton's interpreter or on a GPU.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gated_delta_comparison import LAUNCHES, peer_errors
from benchmarks.gated_delta_layers import DEVICE, Shape
from benchmarks.gated_delta_peers import PEERS, Replay
from benchmarks.peer_kernels import FILES, load_peers
from hf_hybridspec.kernels.common_triton import INTERPRETED

SHAPE = Shape(layers=2, num_k_heads=1, num_v_heads=2, k_dim=32, v_dim=32)
FOLDER = os.environ.get("HF_HYBRIDSPEC_PEERS")
# Both sides compute in fp32 and differ in the order of sums; measured up to 3e-7, with tf32 products 6e-4.
TOLERANCE = 1e-6 if DEVICE == "cpu" else 2e-3


@pytest.fixture
def written(tmp_path) -> Path:
    """A folder of one-line files in place of the kernels, beside packages that must not be executed."""
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from sglang.srt.utils import is_sm90_supported\nis_hopper = is_sm90_supported()\n")
    (tmp_path / "fla/utils/__init__.py").write_text("from fla import __version__\n")
    (tmp_path / "fla/ops/gated_delta_rule/fused_recurrent.py").write_text("from fla.utils import __version__\n")
    for name in ("sglang", "sglang/kernels", "fla", "fla/ops"):
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the engine was imported')\n")
    for name, version in (("sglang", "0.5.23"), ("fla_core", "0.6.0")):
        information = tmp_path / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    return tmp_path


def test_loading_executes_the_kernels_alone_and_leaves_no_modules(written, monkeypatch):
    installed = object()
    monkeypatch.setitem(sys.modules, "fla", installed)
    kernels = load_peers(written)
    assert kernels.versions == {"sglang": "0.5.23", "fla-core": "0.6.0"}
    assert kernels.narrow.is_hopper and not kernels.wide.is_hopper
    assert sys.modules["fla"] is installed
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang" or name.startswith("fla.")]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(written, name):
    (written / name).unlink()
    message = load_peers(written)
    assert f"lacks {name}" in message and "sglang==0.5.23 and fla-core==0.6.0" in message


class Index(int):
    """A loop's index for the interpreter, which counts in plain integers."""

    def to(self, dtype):
        return self


@pytest.fixture(scope="module")
def kernels():
    if FOLDER is None:
        pytest.skip("HF_HYBRIDSPEC_PEERS names no folder with the files of sglang and fla-core")
    loaded = load_peers(Path(FOLDER))
    assert not isinstance(loaded, str), loaded
    if INTERPRETED:
        loaded.fold.range = lambda start, stop: map(Index, range(start, int(stop)))
    return loaded


@pytest.mark.peer
@pytest.mark.parametrize("rows", [2, 3, 6, 16])
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_computes_the_recurrence(kernels, name, rows, monkeypatch):
    peer = PEERS[name](kernels, SHAPE, rows, torch.float32)
    if DEVICE == "cpu" and name in ("sglang", "sglang_tile_32"):
        # Its copy of states asks for a GPU, and runs without one.
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert max(peer_errors(peer, SHAPE, rows, torch.float32).values()) < TOLERANCE


@pytest.mark.peer
def test_every_launch_of_replay_computes_the_recurrence(kernels):
    wide = Shape(layers=1, num_k_heads=1, num_v_heads=1, k_dim=64, v_dim=64)
    for launch in LAUNCHES:
        peer = Replay(kernels, wide, 6, torch.float32, launch=launch)
        assert max(peer_errors(peer, wide, 6, torch.float32).values()) < TOLERANCE, launch


@pytest.mark.peer
@pytest.mark.parametrize(("rows", "length", "rounds"), [(2, 16, 7), (3, 16, 4), (6, 16, 1), (8, 16, 1), (16, 32, 1)])
def test_a_cycle_of_replay_ends_with_an_empty_ring(kernels, rows, length, rounds):
    """In each round but the last the states stay as they were: the ring holds what was committed."""
    peer = Replay(kernels, SHAPE, rows, torch.float32)
    assert (peer.length, peer.rounds_in_cycle) == (length, rounds)
    states = SHAPE.states()
    before, run = states.clone(), peer.bind(states)
    for i in range(rounds):
        assert torch.equal(states, before), f"round {i}"
        run(SHAPE.rows(rows, torch.float32))
    assert not torch.equal(states, before)
