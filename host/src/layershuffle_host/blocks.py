"""A block, ready to run: a graph and its weights in ONNX Runtime."""

from __future__ import annotations

import timeit

import numpy as np
import onnxruntime
from safetensors.numpy import load as tensors_of

from layershuffle_host.graph import RefusedGraph, external_tensors
from layershuffle_host.wire import State, is_finite


class Block:
    """A loaded block, which has been tried once.

    `shape` is that of the state of an image, (tokens, width). `seconds` is the time of one image,
    `bytes` the size of the weights.
    """

    def __init__(
        self, graph: bytes, weights: bytes, *, shape: tuple[int, int], threads: int
    ) -> None:
        """Load a block and try it.

        Raises `RefusedGraph`, or the errors of ONNX Runtime and safetensors.
        """
        names = external_tensors(graph)
        tensors = tensors_of(weights)
        if names != tensors.keys():
            raise RefusedGraph("these are not the weights of this graph")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # A waiting thread would spin on the one core that a small device has.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # An arena keeps what the largest batch took, for each block.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3  # Errors only: the host logs what is wrong with a block.
        # The session copies them, after it has compared their shapes and dtypes with the graph's.
        values = list(map(onnxruntime.OrtValue.ortvalue_from_numpy, tensors.values()))
        options.add_external_initializers(list(tensors), values)
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )
        inputs = [entry.name for entry in self._session.get_inputs()]
        if len(inputs) != 1 or len(self._session.get_outputs()) != 1:
            raise RefusedGraph("the graph is not one of a block: a state in, a state out")
        self._input = inputs[0]
        self.shape = shape
        self.bytes = len(weights)
        # The states of a batch would share the scale of what is quantised as it comes.
        self._one_by_one = b"DynamicQuantizeLinear" in graph
        state = np.zeros((1, *shape), np.float32)
        self.seconds = min(timeit.repeat(lambda: self.run(state), number=1, repeat=2))

    def run(self, state: State) -> State:
        """The state after the block, float32 `[images, tokens, width]`.

        Raises `RefusedGraph` for another shape or dtype, and for numbers that are not finite.
        """
        if self._one_by_one and len(state) > 1:
            return np.concatenate([self.run(one[None]) for one in state])
        (out,) = self._session.run(None, {self._input: state})
        if out.shape != state.shape or out.dtype != np.float32 or not is_finite(out):
            raise RefusedGraph("the block gives no finite state of the shape that it got")
        return out  # type: ignore[no-any-return]
