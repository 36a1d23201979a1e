"""Claim: two blocks side by side, a thread each, beside one block after the other on both threads.

One image, on the clock on the wall. Nothing is promised: it says whether rounds pay inside one
process. Where there is a GPU, the twelve blocks of a ViT-B/16 in four rounds instead, on streams
and with stacked weights, all of them replayed as CUDA graphs.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from _clocks import PICO, SMOKE, VIT_B, WIDTH_64, WIDTH_192, Effort, Side, gpu_timed
from _harness import Claim, ClaimRow, compare, run_claim
from _workload import Workload, make_workload
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import blocks_of, depth_of, running
from layershuffle.core.tensors import logits_of
from layershuffle.models.stem_head import run_head, run_stem

CASES = {"width 64": WIDTH_64, "width 192": WIDTH_192, "width 768": VIT_B}
SMOKES = {"smoke": PICO}
CPU_ROUND, GPU_ROUND = 2, 3
BlockRounds = Sequence[Sequence[nn.Module]]


def wall_timed(work: Callable[[], object]) -> Side:
    """`work` on the wall: processor time would count both threads."""

    def side() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return side


def in_turn(blocks: Sequence[nn.Module], state: Tensor) -> Tensor:
    """One block after the other."""
    for block in blocks:
        state = block(state)
    return state


def summed(state: Tensor, outs: Sequence[Tensor]) -> Tensor:
    """What a round makes of `state`, where its blocks returned `outs`."""
    after, *others = outs
    for out in others:
        after = after + (out - state)
    return after


@torch.inference_mode()
def _run(block: nn.Module, state: Tensor) -> Tensor:
    # Inference mode belongs to a thread.
    out: Tensor = block(state)
    return out


def on_threads(rounds: BlockRounds, state: Tensor, *, pool: ThreadPoolExecutor) -> Tensor:
    """Round after round, a thread for each of its blocks."""
    for blocks in rounds:
        state = summed(state, list(pool.map(partial(_run, state=state), blocks)))
    return state


def on_streams(
    rounds: BlockRounds, state: Tensor, *, streams: Sequence[torch.cuda.Stream]
) -> Tensor:
    """Round after round, a stream for each of its blocks; capturable."""
    main = torch.cuda.current_stream()
    for blocks in rounds:
        outs = []
        for block, stream in zip(blocks, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outs.append(block(state))
        for stream in streams:
            main.wait_stream(stream)
        state = summed(state, outs)
    return state


def stacked(rounds: BlockRounds) -> Callable[[Tensor], Tensor]:
    """Round after round, its blocks as one batched block with their weights stacked."""
    skeleton = copy.deepcopy(rounds[0][0]).to("meta")
    weights = [stack_module_state(list(blocks)) for blocks in rounds]

    def call(parameters: object, buffers: object, state: Tensor) -> Tensor:
        out: Tensor = functional_call(skeleton, (parameters, buffers), (state,))  # type: ignore[arg-type]
        return out

    batched = vmap(call, in_dims=(0, 0, None))

    def run(state: Tensor) -> Tensor:
        for parameters, buffers in weights:
            state = summed(state, batched(parameters, buffers, state).unbind())
        return state

    return run


def captured(work: Callable[[Tensor], Tensor], state: Tensor) -> Callable[[], object]:
    """`work(state)` as a CUDA graph."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            work(state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(state)
    return graph.replay


def check(workload: Workload, state: Tensor, *, size: int) -> float:
    """The largest difference between the logits from `state` and those of the library's rounds."""
    model, depth = workload.model, depth_of(workload.model)
    order = ExecutionOrder.in_rounds([range(k, k + size) for k in range(0, depth, size)], depth)

    def forward(images: Tensor) -> Tensor:
        return logits_of(model(images), model)

    ours = run_head(model, workload.images, state=state, forward=forward)
    with running(model, order):
        difference = float((ours - forward(workload.images)).abs().max())
    assert difference < 1e-3, difference
    return difference


def rounds_of(workload: Workload, size: int) -> tuple[list[nn.Module], BlockRounds, Tensor]:
    """The blocks, the same in rounds of `size`, and the state that enters the first."""
    model = workload.model.eval()
    blocks = list(blocks_of(model))
    state, _ = run_stem(model, workload.images, forward=lambda x: logits_of(model(x), model))
    return blocks, [blocks[k : k + size] for k in range(0, len(blocks), size)], state


@torch.inference_mode()
def rows(effort: Effort) -> Iterator[ClaimRow]:
    """On the GPU where there is one: a result is that of one machine. Else on the CPU, by width."""
    yield from on_gpu(effort) if torch.cuda.is_available() else on_cpu(effort)


def on_cpu(effort: Effort) -> Iterator[ClaimRow]:
    """Two blocks side by side, a thread each, against one after the other on both threads."""
    with ThreadPoolExecutor(CPU_ROUND, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, spec in (SMOKES if effort is SMOKE else CASES).items():
            workload = make_workload(spec, batch_size=1)
            blocks, rounds, state = rounds_of(workload, CPU_ROUND)
            parallel = partial(on_threads, rounds, state, pool=pool)
            difference = check(workload, parallel(), size=CPU_ROUND)
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (2, 1)
            yield compare(
                f"rounds of {CPU_ROUND}, {name}, one image",
                "one after the other on 2 threads / side by side, a thread each",
                a=wall_timed(partial(in_turn, blocks, state)),
                b=wall_timed(parallel),
                effort=effort,
                settings=workload.settings,
                facts={"largest difference of logits": difference},
            )
    if effort is SMOKE:
        # As far as a CPU can try what runs on a GPU: stacked weights, without a graph.
        _, rounds, state = rounds_of(workload, GPU_ROUND)
        # The fused attention of a CPU cannot be batched; those of a GPU can.
        with sdpa_kernel(SDPBackend.MATH):
            check(workload, stacked(rounds)(state), size=GPU_ROUND)


def on_gpu(effort: Effort) -> Iterator[ClaimRow]:
    """A ViT-B/16, one image: 12 steps against 4 rounds, on streams and with stacked weights."""
    workload = make_workload(PICO if effort is SMOKE else VIT_B, batch_size=1, device="cuda")
    blocks, rounds, state = rounds_of(workload, GPU_ROUND)
    streams = [torch.cuda.Stream() for _ in range(GPU_ROUND)]
    ways = {"on streams": partial(on_streams, rounds, streams=streams), "stacked": stacked(rounds)}
    serial = captured(partial(in_turn, blocks), state)
    for name, way in ways.items():
        difference = check(workload, way(state), size=GPU_ROUND)
        yield compare(
            f"rounds of {GPU_ROUND} {name}, ViT-B/16 on a GPU, one image",
            "12 steps / 4 rounds, CUDA graphs",
            a=gpu_timed(serial),
            b=gpu_timed(captured(way, state)),
            effort=effort,
            settings=workload.settings,
            facts={"largest difference of logits": difference},
        )


CLAIM = Claim(
    theme="rounds", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows, threads=2
)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
