"""Programs of a device round captured into CUDA graphs that choose their branches by themselves.

A step is captured once, whatever programs share it: one Stage-0 graph per u, one Stage-1 graph per w and kind of
acceptance. A program is one conditional graph of them, so that a round is one launch.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers.utils import logging

from ..kernels.compile_ahead import compile_ahead
from .conditional_graphs import ConditionalGraph
from .device_round import Program, Step, Switch, run_program


class EagerRounds:
    """Runs programs step by step, on any device: the same round with a host read where a graph would choose."""

    def prepare(self, program: Program) -> Callable[[], None]:
        """What runs the program once."""
        return partial(run_program, program)


class RoundGraphs:
    """Captures programs over one set of buffers.

    Args:
        device: where the buffers are.

    Attributes:
        num_captured: steps captured so far.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Steps run one after the other, so that each may use the memory that the others have left.
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple, torch.cuda.CUDAGraph] = {}
        # Their buffers are what the graphs read and write.
        self._steps: list[Step] = []
        self._graphs: dict[tuple, ConditionalGraph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def prepare(self, program: Program) -> Callable[[], None]:
        """What launches the program on the current stream. Captures what is missing, and then shows progress.

        Capturing runs every missing step, on whatever the buffers hold: no sequence may be under way.

        Raises:
            torch.OutOfMemoryError: the device has no room for the buffers of the steps.
            GraphError: the driver refuses.
        """
        key = _key(program)
        if key not in self._graphs:
            with torch.cuda.device(self._device):
                self._capture([step for step in _steps(program) if step.key not in self._captured])
                self._graphs[key] = self._assemble(program)
        return self._graphs[key].launch

    def _capture(self, steps: list[Step]) -> None:
        if not steps:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        compiled = itertools.count(1)

        def run_all() -> None:
            for step in steps:
                step.run()

        progress = logging.tqdm(total=2 * len(steps), desc="capturing the round", unit="step", leave=False)
        with progress, torch.cuda.stream(self._stream), _without_collection():
            compile_ahead(
                run_all, self._device, lambda: progress.set_postfix_str(f"{next(compiled)} kernels compiled")
            )
            # Kernels are loaded, and lazy states of libraries made, before anything is captured.
            for step in steps:
                step.run()
                progress.update()
            self._stream.synchronize()
            for step in steps:
                self._captured[step.key] = self._capture_one(step)
                self._steps.append(step)
                progress.update()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture_one(self, step: Step) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph() would empty the allocator's cache and collect garbage before each of dozens of graphs.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            step.run()
        finally:
            graph.capture_end()
        return graph

    def _assemble(self, program: Program) -> ConditionalGraph:
        top = ConditionalGraph(self._device)
        for item in program:
            if isinstance(item, Switch):
                branches = [[self._captured[step.key] for step in branch] for branch in item.branches]
                top.add_switch(item.selector, branches)
            else:
                top.add(self._captured[item.key])
        top.instantiate()
        return top


def _steps(program: Program) -> list[Step]:
    """Every step once, in an order in which they can run one after the other."""
    steps: dict[tuple, Step] = {}
    for item in program:
        branches = item.branches if isinstance(item, Switch) else ((item,),)
        for branch in branches:
            for step in branch:
                steps.setdefault(step.key, step)
    return list(steps.values())


def _key(program: Program) -> tuple:
    """Programs of one key are one graph."""
    return tuple(
        (item.selector.data_ptr(), *(tuple(step.key for step in branch) for branch in item.branches))
        if isinstance(item, Switch)
        else item.key
        for item in program
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """A collection may free memory of another graph in the middle of a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
