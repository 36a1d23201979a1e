"""Block hosts: batches, visits that never run, and failures of single visits."""

import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from pico_hosts import (
    LONG,
    TOLERANCE,
    Clock,
    bundle_of,
    error_of,
    host_with,
    run,
    states,
    visit,
)

import layershuffle as ls
from common import DEPTH, FAMILIES, redraw
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.swarm import program as programs
from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.host import MAX_SKIPS, QueuedVisit, next_batch
from layershuffle.swarm.messages import (
    HostFailed,
    HostUnavailable,
    Packet,
    WorkExpired,
    pack,
    unpack,
    unpack_answer,
)
from layershuffle.swarm.program import pack_tensors, read_program
from waiting import HANGS, until


@pytest.fixture
def calls(monkeypatch):
    """Every run of a block: its digest and the images in it; runs wait while `gate` is closed."""

    class Calls(list):
        def begun(self):
            return len(self) > 0

    bundle_of("timm-vit")  # made before, so that its own runs are not among them
    calls, real = Calls(), programs.Block.__call__
    calls.gate = threading.Event()
    calls.gate.set()

    def noted(block, state):
        calls.append((block.digest, len(state)))
        assert calls.gate.wait(HANGS)
        return real(block, state)

    monkeypatch.setattr(programs.Block, "__call__", noted)
    return calls


async def behind_a_closed_gate(host, calls, tasks):
    """Start `tasks()` while another visit holds the worker, then let all run; their results."""
    calls.gate.clear()
    first = visit(host, [3], states(1, seed=99)[0])
    await until(calls.begun)
    waiting = tasks()
    await until(lambda: host.info().waiting == len(waiting))
    calls.gate.set()
    await first
    del calls[0]
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_visits_that_wait_go_together(calls):
    bundle, given = bundle_of("timm-vit"), states(9)
    digest = bundle.digests

    async def work(host):
        return await behind_a_closed_gate(
            host, calls, lambda: [visit(host, [0], state) for state in given]
        )

    answers = run(work, host_with(bundle, max_batch=6))
    assert calls == [(digest[0], 6), (digest[0], 3)]
    assert [answer.batch for answer in answers] == [6] * 6 + [3] * 3
    alone = read_program(bundle.program).bind(bundle.tensors[0])
    for state, answer in zip(given, answers, strict=True):
        wanted = alone(torch.tensor(state)).numpy()
        assert error_of(unpack(answer.packet), wanted) <= TOLERANCE["batched"]


def test_visits_meet_at_the_blocks_they_share(calls):
    bundle = bundle_of("timm-vit")
    first, second = states(2)

    async def work(host):
        return await behind_a_closed_gate(
            host, calls, lambda: [visit(host, [0, 2], first), visit(host, [2, 1], second)]
        )

    answers = run(work, host_with(bundle))
    digest = bundle.digests
    assert calls == [(digest[0], 1), (digest[2], 2), (digest[1], 1)]
    assert all(1 < answer.batch < 2 for answer in answers), "one block alone, one with another"
    blocks = {b: read_program(bundle.program).bind(t) for b, t in bundle.tensors.items()}
    for state, order, answer in zip((first, second), ((0, 2), (2, 1)), answers, strict=True):
        wanted = torch.tensor(state)
        for block in order:
            wanted = blocks[block](wanted)
        assert error_of(unpack(answer.packet), wanted.numpy()) <= TOLERANCE["batched"]


def job(*steps, images=1, passed=0):
    values = np.zeros((images, 2, 3), np.float32)
    return QueuedVisit(steps, Packet("fp32", values), 0.0, 1.0, passed=passed)


def test_the_choice_of_the_next_turn():
    a, b, c = (job("x", "y"), job("y"), job("y"))
    assert next_batch([a, b, c], images=16) == [b, c]  # most need y
    assert next_batch([a, b], images=16) == [a]  # of equals the oldest
    assert next_batch([a, b, c], images=1) == [b]
    patient, impatient = job("x", passed=MAX_SKIPS - 1), job("x", passed=MAX_SKIPS)
    assert next_batch([patient, b, c], images=16) == [b, c]
    assert next_batch([impatient, b, c], images=16) == [impatient]
    large, small = job("y", images=40), job("y", images=2)
    assert next_batch([large, small], images=16) == [large]  # never cut
    assert next_batch([b, large, small], images=16) == [b, small]
    c.alone = True
    assert next_batch([b, c], images=16) == [b]
    a.done = 1
    assert next_batch([a, b], images=16) == [a, b]


def test_expired_and_cancelled_visits_never_run(calls):
    bundle, clock = bundle_of("timm-vit"), Clock()

    async def work(host):
        calls.gate.clear()
        running = visit(host, [3], states(1, seed=99)[0])
        await until(calls.begun)
        tasks = [visit(host, [0], state) for state in states(3)]
        tasks.append(visit(host, [1], states(1)[0], budget_ms=0.0))
        tasks.append(visit(host, [1], states(1)[0], budget_ms=40.0))
        await asyncio.sleep(0)  # all have come
        tasks[0].cancel()
        await asyncio.sleep(0)
        clock.now += 0.08
        calls.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await running
        assert host.info().waiting == 0
        return results

    first, second, _, hasty, short = run(work, host_with(bundle, clock=clock))
    digest = bundle.digests
    assert calls == [(digest[3], 1), (digest[0], 2)]
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(hasty, WorkExpired)
    assert isinstance(short, WorkExpired)
    assert second.queue_ms == pytest.approx(80)


def test_a_visit_expires_between_its_blocks(calls):
    clock = Clock()

    async def work(host):
        calls.gate.clear()
        task = visit(host, [0, 1], states(1)[0], budget_ms=30.0)
        await until(calls.begun)
        clock.now += 0.05
        calls.gate.set()
        with pytest.raises(WorkExpired):
            await task

    run(work, host_with(bundle_of("timm-vit"), clock=clock))
    assert len(calls) == 1


def test_a_full_queue_turns_visits_away(calls):
    async def work(host):
        results = await behind_a_closed_gate(
            host, calls, lambda: [visit(host, [0], state) for state in states(2)]
        )
        calls.gate.clear()
        tasks = [visit(host, [0], state) for state in states(1)]
        await until(lambda: len(calls) == 2)
        tasks += [visit(host, [0], state) for state in states(3)]
        await until(tasks[3].done)
        tasks[1].cancel()
        await asyncio.sleep(0)
        tasks.append(visit(host, [0], states(1)[0]))  # there is room again
        await asyncio.sleep(0)
        calls.gate.set()
        return results, await asyncio.gather(*tasks, return_exceptions=True)

    waited, (busy, cancelled, waiting, refused, later) = run(
        work, host_with(bundle_of("timm-vit"), max_queue=2)
    )
    assert [answer.batch for answer in waited] == [2, 2]
    assert isinstance(refused, HostUnavailable)
    assert "2 visits wait" in refused.cause
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (busy.batch, waiting.batch, later.batch) == (1, 2, 2)


def test_the_event_loop_stays_free_while_a_block_runs(calls):
    clock = Clock()

    async def work(host):
        calls.gate.clear()
        task = visit(host, [0], states(1)[0])
        await until(calls.begun)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        clock.now += 0.02
        calls.gate.set()
        return await task

    answer = run(work, host_with(bundle_of("timm-vit"), clock=clock))
    assert (answer.compute_ms, answer.queue_ms) == (pytest.approx(20), 0)


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_narrow_wires_stay_within_their_tolerance(wire):
    bundle = bundle_of("timm-vit")
    state = bundle.sample

    async def work(host):
        return [
            await host.visit([block], pack(state, wire), budget_ms=LONG) for block in range(DEPTH)
        ]

    for block, answer in enumerate(run(work, host_with(bundle))):
        assert answer.packet.wire == wire
        after = unpack_answer(answer.packet, before=state)
        error = error_of(after, bundle.compute(block, state))
        assert 0 < error <= TOLERANCE[wire], f"block {block}: {error:.1e}"


def test_a_swap_under_load_loses_nothing(calls):
    bundle = bundle_of("timm-vit")
    sibling = make_bundle(ls.wrap(redraw(FAMILIES["timm-vit"].plain(), seed=5)))
    state, code = states(1)[0], read_program(bundle.program)
    old, new = (
        code.bind(source.tensors[0])(torch.tensor(state)).numpy() for source in (bundle, sibling)
    )

    async def work(host):
        calls.gate.clear()
        del calls[:]
        before = [visit(host, [0], state) for _ in range(5)]
        await until(calls.begun)
        host.load(sibling.program, [0], sibling.tensors[0])
        after = [visit(host, [0], state) for _ in range(5)]
        await asyncio.sleep(0)
        calls.gate.set()
        results = [await asyncio.gather(*before), await asyncio.gather(*after)]
        assert host.info().blocks == {**bundle.digests, 0: sibling.digests[0]}
        return results

    before, after = run(work, host_with(bundle))
    assert all(error_of(unpack(a.packet), old) <= TOLERANCE["batched"] for a in before)
    assert all(error_of(unpack(a.packet), new) <= TOLERANCE["batched"] for a in after)
    assert error_of(new, old) > 0.1


def test_what_does_not_fit_is_not_loaded():
    bundle, other = bundle_of("timm-vit"), bundle_of("hf-siglip")
    host = host_with(bundle, blocks=[0, 1])
    before = host.info().blocks
    wide = {"norm1.weight": torch.zeros(48)}
    for program, content, message, kind in (
        (bundle.program, bundle.tensors[2][:-8], "not whole", ModelFileError),
        (bundle.program, other.tensors[2], "not the weights of such a block", ModelFileError),
        (bundle.program, pack_tensors(wide), "absent, the program needs", ModelFileError),
        (other.program, other.tensors[2], "one model", UsageError),
    ):
        with pytest.raises(kind, match=message):
            host.load(program, [2], content)
    assert host.info().blocks == before == {b: bundle.digests[b] for b in (0, 1)}
    host.close()


def test_a_visit_that_fails_takes_no_other_along():
    bundle, (one, two) = bundle_of("timm-vit"), states(2)
    torn = Packet("int8", one.astype(np.int8), np.ones((5, 17, 1), np.float32))

    async def work(host):
        small = Packet("fp32", np.zeros((1, 5, 3), np.float32))
        for blocks, packet, message in ([], pack(one, "fp32"), "0 blocks"), ([0], small, "1, 5, 3"):
            with pytest.raises(HostFailed, match=message):
                await host.visit(blocks, packet, budget_ms=LONG)
        tasks = [visit(host, [0], one), visit(host, [0], two)]
        tasks.insert(1, asyncio.create_task(host.visit([0], torn, budget_ms=LONG)))
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, bad, second = run(work, host_with(bundle))
    assert isinstance(bad, HostFailed)
    alone = read_program(bundle.program).bind(bundle.tensors[0])
    for state, answer in ((one, first), (two, second)):
        wanted = alone(torch.tensor(state)).numpy()
        assert error_of(unpack(answer.packet), wanted) <= TOLERANCE["batched"]


def test_numbers_that_are_not_finite_are_answered_as_they_are():
    state = states(1)[0]
    state[0, 3, 5] = np.nan
    state.flags.writeable = False  # as arrays come out of Ray

    async def work(host):
        return await host.visit([0], pack(state, "fp32"), budget_ms=LONG)

    assert np.isnan(unpack(run(work, host_with(bundle_of("timm-vit"))).packet)).any()


def test_visits_finish_with_blocks_that_are_unloaded(calls):
    async def work(host):
        with pytest.raises(HostUnavailable, match="does not hold block 7"):
            await host.visit([0, 7], pack(states(1)[0], "fp32"), budget_ms=LONG)
        calls.gate.clear()
        under_way = [visit(host, [0, 1], state) for state in states(2)]
        await until(calls.begun)
        assert host.info().computing + host.info().waiting == 2
        assert host.info().computing >= 1
        host.unload([0])
        assert sorted(host.info().blocks) == [1, 2, 3]
        calls.gate.set()
        return await asyncio.gather(*under_way)

    assert len(run(work, host_with(bundle_of("timm-vit")))) == 2


def test_closing_turns_everybody_away(calls):
    async def work(host):
        calls.gate.clear()
        tasks = [visit(host, [0], state) for state in states(3)]
        await until(calls.begun)
        host.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, HostUnavailable) for result in results)
        with pytest.raises(HostUnavailable, match="closed"):
            await visit(host, [0], states(1)[0])
        calls.gate.set()
        name = "host-pi"
        await until(lambda: not any(t.name.startswith(name) for t in threading.enumerate()))

    run(work, host_with(bundle_of("timm-vit")))
    assert len(calls) == 1


def test_what_a_host_says_of_itself():
    bundle = bundle_of("timm-vit")
    host = host_with(bundle, blocks=[1, 3])
    info = host.info()
    host.close()
    assert (info.name, info.pid, info.waiting) == ("pi", os.getpid(), 0)
    assert info.blocks == {1: bundle.digests[1], 3: bundle.digests[3]}


ALONE = """
import asyncio, sys
from pathlib import Path
import numpy as np
from layershuffle.swarm.host import BlockHost
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import pack

here = Path(sys.argv[1])
host = BlockHost("alone", limits=Limits(), threads=1)
host.load((here / "program").read_bytes(), [0], (here / "block").read_bytes())
state = np.load(here / "state.npy")
answer = asyncio.run(host.visit([0], pack(state, "fp32"), budget_ms=60_000.0))
host.close()
np.save(here / "answer.npy", answer.packet.values)
heavy = {"timm", "transformers", "torchvision", "sklearn", "scipy", "ray", "sympy"}
print(sorted(heavy & set(sys.modules)), "torch._inductor" in sys.modules)
"""


def test_a_host_needs_torch_alone(tmp_path):
    bundle = bundle_of("timm-vit")
    (tmp_path / "program").write_bytes(bundle.program)
    (tmp_path / "block").write_bytes(bundle.tensors[0])
    np.save(tmp_path / "state.npy", bundle.sample)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "[] False\n", done.stderr
    answer = np.load(tmp_path / "answer.npy")
    assert answer.tobytes() == bundle.compute(0, bundle.sample).tobytes()
