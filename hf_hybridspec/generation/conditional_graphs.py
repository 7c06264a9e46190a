"""CUDA graphs that branch on the device: captured graphs joined by SWITCH and WHILE nodes.

torch captures the pieces, cuda-bindings (the extra `cuda`) joins them. What runs is decided by an int32 in device
memory at the moment the node is reached, so that the host launches a whole round without reading any length.
"""

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

try:
    from cuda.bindings import driver, nvrtc
except ImportError:
    driver = nvrtc = None

# SWITCH nodes came with CUDA 12.8, as cuDriverGetVersion spells it.
OLDEST_DRIVER = 12080

# NVRTC leaves the function external; the driver resolves it when the module is loaded.
_SETTER_SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void set_conditional(unsigned long long handle, const int *value) {
    cudaGraphSetConditional(handle, (unsigned int)*value);
}
"""


class GraphError(RuntimeError):
    """A call of the CUDA driver failed while a graph was built or launched; the message names call and cause."""


def conditional_graph_obstacle(device: torch.device) -> str | None:
    """Why graphs cannot branch on this device, as the rest of a sentence, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the target is on a {device.type} device without CUDA"
    if driver is None:
        return "the package cuda-bindings is missing (pip install 'hf-hybridspec[cuda]')"
    try:
        version = _checked("cuDriverGetVersion", driver.cuDriverGetVersion())
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        return f"a CUDA library cannot be loaded ({error})"
    if version < OLDEST_DRIVER:
        return f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, conditional graphs need 12.8"
    return None


class GraphBody:
    """A sequence of steps in a graph; each starts when the one before it has ended.

    Captured graphs must have been captured with `keep_graph=True`, hold kernels, copies and fills only, and outlive
    this object: their kernels' memory is theirs.
    """

    def __init__(self, top: "ConditionalGraph", graph: Any):
        self._top = top
        self._graph = graph
        self._last: list = []

    def add(self, captured: torch.cuda.CUDAGraph) -> None:
        """Appends a captured graph (a copy of its nodes)."""
        child = driver.CUgraph(captured.raw_cuda_graph())
        self._append("cuGraphAddChildGraphNode", driver.cuGraphAddChildGraphNode, child)

    def add_switch(self, selector: torch.Tensor, branches: Sequence[Sequence[torch.cuda.CUDAGraph]]) -> None:
        """Appends a choice: branch i runs, all its graphs in order, if `selector` holds i; any other value runs none.

        Args:
            selector: one int32 on the device, read when the node is reached. Its memory must outlive this object.
        """
        handle = self._set_from(selector)
        kind = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
        for body, branch in zip(self._conditional(handle, kind, len(branches)), branches, strict=True):
            for captured in branch:
                body.add(captured)

    @contextmanager
    def loop(self, condition: torch.Tensor) -> Iterator["GraphBody"]:
        """Appends a loop that runs the body filled within the `with` block while `condition` is not zero.

        Args:
            condition: one int32 on the device, read before the first and after every run of the body.
        """
        handle = self._set_from(condition)
        (body,) = self._conditional(handle, driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE, 1)
        yield body
        body._set(handle, condition)

    def _set_from(self, value: torch.Tensor) -> Any:
        """A new handle, and a step that sets it to what `value` holds."""
        if value.dtype != torch.int32 or value.numel() != 1 or not value.is_cuda:
            raise ValueError(
                f"A branch is chosen by one int32 on a CUDA device, got {value.dtype} {tuple(value.shape)} on "
                f"{value.device}."
            )
        handle = _checked(
            "cuGraphConditionalHandleCreate",
            driver.cuGraphConditionalHandleCreate(self._top._graph, self._top._context, 0, 0),
        )
        self._set(handle, value)
        return handle

    def _set(self, handle: Any, value: torch.Tensor) -> None:
        self._top._kept.append(value)
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = _setter(value.device.index)
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX = params.blockDimY = params.blockDimZ = 1
        params.sharedMemBytes = 0
        params.kernelParams = ((int(handle), value.data_ptr()), (ctypes.c_ulonglong, ctypes.c_void_p))
        self._append("cuGraphAddKernelNode", driver.cuGraphAddKernelNode, params)

    def _conditional(self, handle: Any, kind: Any, size: int) -> list["GraphBody"]:
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = kind
        params.conditional.size = size
        params.conditional.ctx = self._top._context
        node = _checked(
            "cuGraphAddNode",
            driver.cuGraphAddNode(self._graph, self._last, None, len(self._last), params),
        )
        self._last = [node]
        # Only now does the driver's array of body graphs exist.
        return [GraphBody(self._top, graph) for graph in params.conditional.phGraph_out]

    def _append(self, name: str, add_node: Any, content: Any) -> None:
        self._last = [_checked(name, add_node(self._graph, self._last, len(self._last), content))]


class ConditionalGraph(GraphBody):
    """A graph that is put together, instantiated once and launched many times.

    Args:
        device: where everything runs.

    Raises:
        GraphError: from any method, if the driver refuses.
    """

    def __init__(self, device: torch.device):
        # The thread's context is made current by the first real call only.
        torch.cuda.synchronize(device)
        self._kept: list[torch.Tensor] = []
        self._executable = None
        with torch.cuda.device(device):
            self._context = _checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
            graph = _checked("cuGraphCreate", driver.cuGraphCreate(0))
        weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
        super().__init__(self, graph)

    def instantiate(self) -> None:
        """Makes the graph executable and brings it to the device. Nothing can be added afterwards."""
        executable = _checked("cuGraphInstantiate", driver.cuGraphInstantiate(self._graph, 0))
        weakref.finalize(self, driver.cuGraphExecDestroy, executable).atexit = False
        self._executable = executable
        _checked("cuGraphUpload", driver.cuGraphUpload(executable, _current_stream()))

    def launch(self) -> None:
        """Launches the graph on torch's current stream; launches of one graph run one after the other."""
        if self._executable is None:
            raise RuntimeError("The graph is not executable yet: call instantiate() first.")
        _checked("cuGraphLaunch", driver.cuGraphLaunch(self._executable, _current_stream()))


def _current_stream() -> Any:
    return driver.CUstream(torch.cuda.current_stream().cuda_stream)


@functools.cache
def _setter(device_index: int) -> Any:
    """The kernel that copies an int from device memory into a conditional handle."""
    major, minor = torch.cuda.get_device_capability(device_index)
    with torch.cuda.device(device_index):
        module = _checked("cuModuleLoadData", driver.cuModuleLoadData(compile_setter(f"sm_{major}{minor}")))
    return _checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, b"set_conditional"))


def compile_setter(architecture: str) -> bytes:
    """The setter kernel as machine code for an architecture such as `sm_90`."""
    program = _checked(
        "nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(_SETTER_SOURCE, b"set_conditional.cu", 0, [], [])
    )
    _checked(
        "nvrtcCompileProgram",
        nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()]),
    )
    code = bytes(_checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program)))
    _checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(name: str, result: tuple) -> Any:
    """The value of a driver or NVRTC call; raises GraphError if it failed."""
    code, *values = result
    if int(code) != 0:
        raise GraphError(f"{name} failed with {code.name}. Decoding goes on without graphs, or report the message.")
    return values[0] if values else None
