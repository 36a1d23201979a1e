"""New names for old liars: what a new host answers counts once it was computed again here."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from dial_site import replayed, states
from virtual_site import VirtualHost, VirtualSite, virtual_gateway

from clock import loop_time, run_virtual
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import Route
from layershuffle.gateway.hosts.shut_out import ShutOut
from layershuffle.ground.errors import UsageError
from layershuffle_host.wire import State
from waiting import until

DEPTH = 12
# The hosts of these tests know canaries and first tests by their short budget.
LIMITS = Limits(deadline_ms=5000, audit_share=0.02, start_ms=500)


def enlarged(state: State) -> State:
    return (1.5 * state).astype("float32")


async def walk(site: VirtualSite, seed: int) -> tuple[State, State, Route]:
    start = states(seed=seed)
    state, route = await site.router.walk(start, deadline=loop_time() + 5, min_blocks=1)
    return start, state, route


@pytest.mark.parametrize("honest", [1, 2])
def test_no_lie_of_a_host_with_a_new_name_counts(honest: int) -> None:
    """It comes back under another name each time that it is shut out, for 40 names."""

    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            for number in range(honest):
                VirtualHost(site, f"good-{number}")
            await until(lambda: min(site.copies()) == honest)
            seed = 0
            for number in range(40):
                name = f"liar-{number}"
                liar = VirtualHost(site, name, lie=enlarged)
                await until(lambda n=name: len(site.router.swarm[n].blocks) > 0)
                while site.router.swarm[name].condition != "shut-out":
                    for start, state, route in await asyncio.gather(
                        *(walk(site, seed + turn) for turn in range(4))
                    ):
                        assert route.kept == DEPTH
                        assert state.tobytes() == (await replayed(start, route)).tobytes()
                    seed += 4
                assert liar.visits > 0
                liar.close(1001, "bye")

    run_virtual(main())


def opposed(state: State) -> State:
    """A lie that looks as usual: of the same length, and no further from the state."""
    generator = np.random.default_rng(state[0, 0, :4].tobytes()[0])
    return state[:, generator.permutation(state.shape[1])].copy()


@pytest.mark.parametrize("honest_visits", [8, 50, 200])
def test_a_liar_that_first_earns_trust_gains_little(honest_visits: int) -> None:
    """It answers rightly for a while, then lies to every visit, and comes back under a new name."""

    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            VirtualHost(site, "good")
            await until(lambda: min(site.copies()) == 1)
            wrong, answers = 0, 0
            for number in range(3):
                name = f"liar-{number}"
                visits = itertools.count()
                liar = VirtualHost(
                    site,
                    name,
                    lie=lambda state, v=visits: (
                        opposed(state) if next(v) >= honest_visits else state
                    ),
                )
                await until(lambda n=name: len(site.router.swarm[n].blocks) > 0)
                while site.router.swarm[name].condition != "shut-out":
                    start, state, route = await walk(site, answers)
                    answers += 1
                    wrong += state.tobytes() != (await replayed(start, route)).tobytes()
                liar.close(1001, "bye")
            assert wrong <= 0.1 * answers

    run_virtual(main())


def test_a_liar_that_leaves_with_its_lie_gains_nothing() -> None:
    """Its connection ends before anybody can look at the answer, each time."""

    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            VirtualHost(site, "good")
            await until(lambda: min(site.copies()) == 1)
            for number in range(20):
                name = f"liar-{number % 2}"
                liar = VirtualHost(site, name, lie=enlarged, leaves=True)
                await until(
                    lambda n=name: site.router.swarm[n].blocks or n in site.coordinator.shut_out.why
                )
                for seed in range(3):
                    start, state, route = await walk(site, 3 * number + seed)
                    assert state.tobytes() == (await replayed(start, route)).tobytes()
                liar.close(1001, "bye")
            assert set(site.coordinator.shut_out.why) == {"liar-0", "liar-1"}

    run_virtual(main())


def test_first_answers_count_once_they_are_computed_again_and_later_ones_at_once() -> None:
    limits = LIMITS.model_copy(update={"audit_share": 1e-9, "first_audits": 5})

    async def main() -> None:
        async with virtual_gateway(limits) as site:
            VirtualHost(site, "only")
            await until(lambda: min(site.copies()) == 1)
            for seed in range(3):
                start, state, route = await walk(site, seed)
                assert (route.kept, {hop.outcome for hop in route.hops}) == (DEPTH, {"answered"})
                assert state.tobytes() == (await replayed(start, route)).tobytes()
            # After five, a sixth of the visits and fewer is audited beside the request.
            assert 5 <= site.coordinator.health.audited <= 5 + 20
            view = site.router.swarm["only"]
            assert (view.waiting, view.condition) == (0, "healthy")

    run_virtual(main())


def test_a_liar_that_alone_holds_blocks_costs_them_and_no_answer_is_wrong() -> None:
    async def main() -> None:
        async with virtual_gateway(LIMITS) as site:
            VirtualHost(site, "good", memory=6 * 135_000)
            await until(lambda: sum(site.copies()) == 6)
            VirtualHost(site, "liar", lie=enlarged)
            await until(lambda: min(site.copies()) >= 1)
            start, state, route = await walk(site, 0)
            assert route.kept == 6
            assert [hop.outcome for hop in route.hops if hop.host == "liar"] == ["wrong"]
            assert state.tobytes() == (await replayed(start, route)).tobytes()

    run_virtual(main())


def test_who_is_shut_out_stays_out_when_the_gateway_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "shut-out.json"

    async def lies() -> None:
        async with virtual_gateway(LIMITS, shut_out=ShutOut(file)) as site:
            VirtualHost(site, "liar", lie=enlarged)
            await until(lambda: min(site.copies()) == 1)
            await walk(site, 0)
            await until(lambda: "liar" in site.coordinator.shut_out.why)

    async def comes_back() -> None:
        async with virtual_gateway(LIMITS, shut_out=ShutOut(file)) as site:
            assert site.router.swarm["liar"].condition == "shut-out"
            liar = VirtualHost(site, "liar", lie=enlarged)
            VirtualHost(site, "good")
            await until(lambda: min(site.copies()) == 1)
            assert site.router.swarm["liar"].condition == "shut-out"
            assert not liar.assigned
            site.coordinator.readmit("liar")
            assert json.loads(file.read_text()) == {}
            VirtualHost(site, "liar")
            await until(lambda: min(site.copies()) == 2)

    run_virtual(lies())
    assert json.loads(file.read_text()) == {"liar": "it answered wrongly for block 0"}
    assert file.stat().st_mode & 0o077 == 0
    run_virtual(comes_back())


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"a": 1}'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "shut-out.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="shut out cannot be read"):
        ShutOut(file)
