"""Placements against every placement there is, simulated figures against those by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from layershuffle.errors import SettingsError, UsageError
from layershuffle.swarm.plan import HostPlan, plan_text, read_swarm_plan
from layershuffle.swarm.planning.hosts import (
    OBJECTIVES,
    HostsFile,
    HostSpec,
    ModelFacts,
    PlacementProblem,
    facts_of,
    hosts_of,
    read_hosts,
)
from layershuffle.swarm.planning.placement import least_load, place, solve
from layershuffle.swarm.planning.planner import in_unit, plan
from layershuffle.swarm.planning.report import figures_of, plan_report

HOSTS, BLOCKS = 3, 4
MB = 1_000_000
ACCURACY = {1: 10.0, 2: 40.0, 3: 60.0, 4: 70.0}
SEEDS = range(4)


def facts(depth=BLOCKS, **fields):
    return ModelFacts(
        **{
            "block_bytes": (MB,) * depth,
            "state_bytes": 100_000,
            "block_ms": 4.0,
            "accuracy": ACCURACY,
            **fields,
        }
    )


def drawn(seed, hosts=HOSTS, depth=BLOCKS, radio=False, roomy=False):
    """Unequal hosts with room for one to all blocks, and for all blocks together."""
    draw = np.random.default_rng(seed)
    specs = {}
    for i in range(hosts):
        room = int(draw.integers(1, depth + 1)) if i else depth - hosts + 1 + seed % 2
        specs[f"h{i}"] = HostSpec(
            memory_mb=(depth if roomy else room) + 0.5,
            speed=float(draw.uniform(0.2, 3)),
            link_ms=float(draw.uniform(0.5, 9)),
            bandwidth_mbit=float(draw.uniform(40, 400)) if radio else None,
            battery_wh=float(draw.uniform(1, 20)),
            joules_per_block=float(draw.uniform(0.1, 2)),
            joules_per_mb=float(draw.uniform(0, 4)) if radio else 0.0,
            availability=float(draw.uniform(0.5, 0.99)),
        )
    return HostsFile(hosts=specs)


def problem(file, model=None, *, demand=None, **asked):
    model = model or facts()
    return PlacementProblem(
        hosts=hosts_of(file, model), facts=model, demand=demand or model.depth, **asked
    )


def placements(asked):
    """Every placement that keeps memory, replicas and reach, from their definitions."""
    blocks = len(asked.sizes)
    cells = np.array(list(product([False, True], repeat=HOSTS * blocks)))
    tables = cells.reshape(-1, HOSTS, blocks)
    fits = (tables @ asked.sizes <= asked.column("memory")).all(axis=1)
    fits &= (tables.sum(axis=1) >= asked.replicas).all(axis=1)
    away = np.where(tables, 1 - asked.column("availability")[:, None], 1.0).prod(axis=1)
    return tables[fits & (1 - away >= (asked.reach or 0)).all(axis=1)]


def least_by_cuts(tables, costs, demand):
    """Least largest load over placements: a minimum cut, over all sets of blocks.

    Hosts that hold nothing of a set cannot help with it, and outside of it at most one of each
    block runs.
    """
    least = np.zeros(len(tables))
    for chosen in product([False, True], repeat=BLOCKS):
        outside = BLOCKS - sum(chosen)
        able = (tables[:, :, np.array(chosen)].any(axis=2) / costs).sum(axis=1)
        if demand > outside:
            least = np.maximum(least, (demand - outside) / able)
    return least.min()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("asked", [{}, {"replicas": 2}, {"reach": 0.9}, {"demand": 3}], ids=str)
def test_shared_loads_equal_the_best_of_all_placements(seed, asked):
    whole = problem(drawn(seed), **asked)
    tables = placements(whole)
    for objective, costs in (
        ("throughput", whole.column("block")),
        ("lifetime", whole.column("block_energy") / whole.column("battery")),
    ):
        if not len(tables):
            with pytest.raises(UsageError):
                solve(whole, objective)
            continue
        best = solve(whole, objective)
        assert best.value == pytest.approx(least_by_cuts(tables, costs, whole.demand), rel=1e-5)
        assert best.bound <= best.value * (1 + 1e-6)
        assert any((best.placement == table).all() for table in tables)
        np.testing.assert_allclose(best.shares.sum(), whole.demand, rtol=1e-6)
        used = (costs * best.shares.sum(axis=1)).max()
        assert used == pytest.approx(best.value, rel=1e-5)


def quickest(whole, table):
    """Least time of a request over a placement, from all ways to run `demand` blocks on it."""
    ways = [[-1, *np.flatnonzero(column)] for column in table.T]
    times = []
    for way in product(*ways):
        ran = [host for host in way if host >= 0]
        if len(ran) == whole.demand:
            times.append(whole.column("block")[ran].sum() + whole.hop[list(set(ran))].sum())
    return min(times)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("asked", [{}, {"replicas": 2}, {"demand": 2}], ids=str)
def test_the_latency_is_the_least_of_all_placements_and_routes(seed, asked):
    whole = problem(drawn(seed, radio=True), **asked)
    tables = placements(whole)
    if not len(tables):
        with pytest.raises(UsageError, match="copies"):
            solve(whole, "latency")
        return
    full = tables[tables.sum(axis=(1, 2)) == tables.sum(axis=(1, 2)).max()]  # copies cost nothing
    best = solve(whole, "latency")
    assert best.value == pytest.approx(min(quickest(whole, table) for table in full), rel=1e-6)
    assert whole.fits(best.placement)
    fixed = solve(whole, "latency", fixed=full[0])
    assert fixed.value == pytest.approx(quickest(whole, full[0]), rel=1e-6)


def by_routes(whole, table, objective):
    """Least largest load over a placement, by a linear programme over every single route."""
    columns = []
    for way in product(*[np.flatnonzero(column) for column in table.T]):
        hosts = np.array(way)
        run = np.bincount(hosts, minlength=HOSTS)
        visits = np.bincount(np.unique(hosts), minlength=HOSTS)
        loads = whole.loads(objective)
        columns.append(np.concatenate([a.per_block * run + a.per_visit * visits for a in loads]))
    unit = np.max(columns)
    upper = np.column_stack([np.array(columns).T / unit, -np.ones(len(columns[0]))])
    costs = np.zeros(len(columns) + 1)
    costs[-1] = 1
    shares = np.ones((1, len(columns) + 1))
    shares[0, -1] = 0
    result = linprog(costs, A_ub=upper, b_ub=np.zeros(len(upper)), A_eq=shares, b_eq=[1.0])
    return result.fun * unit


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objective", ["throughput", "lifetime"])
def test_visits_that_weigh_against_all_routes(seed, objective):
    """Exact where holdings do not overlap in part, else a bound."""
    whole = problem(drawn(seed, radio=True, roomy=True))
    draw = np.random.default_rng(seed)
    table = draw.random((HOSTS, BLOCKS)) < 0.6
    table[0] |= ~table.any(axis=0)
    free = solve(whole, objective, fixed=table).value
    assert free <= by_routes(whole, table, objective) * (1 + 1e-6)
    same = np.array([table[0], table[0], ~table[0]])
    if not table[0].all():
        free = solve(whole, objective, fixed=same).value
        assert free == pytest.approx(by_routes(whole, same, objective), rel=1e-5)


# --- tied places ---------------------------------------------------------------------------------

TIED_PLACES = ((0, 2, 3), (1, 4))
TIED = facts(block_bytes=(MB, MB), places=TIED_PLACES)


@pytest.mark.parametrize(("seed", "demand"), [(0, 5), (1, 3)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_tied_places_against_every_placement_of_single_ones(seed, objective, demand):
    """A block is stored once and runs its places as that many blocks of the same host would."""
    asked = problem(drawn(seed, radio=True), TIED, demand=demand)
    # Room for all single blocks, because the closed-form bound goes by memory.
    roomy = tuple(replace(host, memory=5.0 * MB) for host in asked.hosts)
    single = replace(asked, hosts=roomy, facts=facts(depth=5))
    expanded = (table[:, [0, 1, 0, 0, 1]] for table in placements(asked))
    values = [solve(single, objective, fixed=table).value for table in expanded]
    best, greedy = solve(asked, objective), place(asked, objective)
    assert best.value == pytest.approx(min(values), rel=1e-5)
    assert asked.fits(greedy.placement)
    assert least_load(asked, objective) <= best.value * (1 + 1e-6) <= greedy.value * (1 + 3e-6)


def test_a_plan_of_tied_places_needs_the_memory_of_different_blocks():
    file = HostsFile(hosts={"pi": HostSpec(count=2, memory_mb=1.5, speed=1.0)})
    with pytest.raises(UsageError, match=r"short by 3\.00 MB"):
        plan(file, facts(depth=5), objective="throughput")
    made, planned = plan(file, TIED, objective="throughput")
    assert sorted(host.blocks for host in made.hosts.values()) == sorted(TIED_PLACES)
    assert "5 places share the weights of 2 blocks" in plan_report(made, planned)
    # The host with three places is the busy one, and takes 4 ms for each.
    assert planned.value == pytest.approx(1000 / 12)


# --- the greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("radio", [False, True])
def test_the_greedy_against_the_optimum(seed, objective, radio):
    """At least 60 % of the optimum on swarms far smaller, and fuller, than those it is for."""
    whole = problem(drawn(seed, hosts=5, depth=5, radio=radio), facts(depth=5))
    greedy, best = place(whole, objective), solve(whole, objective)
    assert whole.fits(greedy.placement)
    assert best.value <= greedy.value * (1 + 1e-6)
    assert greedy.value <= best.value / 0.6
    assert least_load(whole, objective) <= best.value * (1 + 1e-6)


def large(count=100):
    return HostsFile(
        hosts={
            "pi": HostSpec(
                count=count, memory_mb=3, speed=0.3, link_ms=5, bandwidth_mbit=50, battery_wh=5,
                watts=3, joules_per_mb=0.5, availability=0.8,
            ),
            "box": HostSpec(count=count // 10, memory_mb=12, speed=2, battery_wh=50, watts=30),
        }
    )  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_large_swarm_comes_within_a_percent_of_the_bound(objective):
    best, planned = plan(large(), facts(depth=12), objective=objective, replicas=3, reach=0.999)
    assert planned.solution.solver == "greedy"
    assert planned.gap < 0.01
    best.check(12)
    copies = [sum(b in host.blocks for host in best.hosts.values()) for b in range(12)]
    assert min(copies) >= 3
    assert planned.problem.fits(planned.solution.placement)


# --- what is printed and simulated ----------------------------------------------------------------


def test_figures_by_hand():
    """Two hosts with two of four blocks each, one twice as fast; alternate blocks forced."""
    model = facts(block_bytes=(MB,) * 4)
    file = HostsFile(
        hosts={
            "a": HostSpec(memory_mb=2, blocks_per_s=100, link_ms=5, availability=0.9),
            "b": HostSpec(
                memory_mb=2, blocks_per_s=50, link_ms=1, bandwidth_mbit=16, battery_wh=1,
                joules_per_block=2, joules_per_mb=10, availability=0.5,
            ),
        }
    )  # fmt: skip
    best, planned = plan(file, model, objective="latency")
    free = figures_of(best, planned, routing="order-free")
    ordered = figures_of(best, planned, routing="replicated-sequential")
    assert sorted(block for host in best.hosts.values() for block in host.blocks) == [0, 1, 2, 3]
    transfer = 2 * 100_000 * 8 / 16e6
    latency = 5 + 1 + 2 * 10 + 2 * 20 + 1000 * transfer
    assert planned.value == pytest.approx(latency)
    assert free.latency_ms == pytest.approx(latency)
    assert free.throughput == pytest.approx(1 / 0.04, rel=0.02)  # the slower host is always busy
    assert free.life == pytest.approx(3600 / (2 * 2 + 10 * 0.2))
    assert free.answered == pytest.approx(1 - 0.1 * 0.5, abs=0.01)
    assert free.blocks == pytest.approx((4 * 0.45 + 2 * 0.5) / 0.95, abs=0.03)
    assert free.accuracy == pytest.approx(70 * 0.45 + 40 * 0.5, abs=1)
    assert ordered.latency_ms == pytest.approx(latency)  # each host holds one interval
    assert ordered.answered == pytest.approx(0.45, abs=0.015)
    assert ordered.blocks == 4
    assert ordered.accuracy == pytest.approx(70 * ordered.answered)
    text = plan_report(best, planned)
    assert "can be reached 50.00 % of the time" in text
    assert "Warning: blocks with a single holder: 4. While" in text
    short = best.limits.model_copy(update={"deadline_ms": 60})
    assert "longer than its deadline of 60 ms" in plan_report(
        best.model_copy(update={"limits": short}), planned
    )


def test_order_freedom_saves_visits():
    """Blocks 0, 2 on one host, 1, 3 on the other: two visits in free order, four in order."""
    file = HostsFile(hosts={"h": HostSpec(count=2, memory_mb=2, link_ms=10)})
    whole = problem(file)
    table = np.array([[1, 0, 1, 0], [0, 1, 0, 1]], dtype=bool)
    assert solve(whole, "latency", fixed=table).value == pytest.approx(0.036)
    best, planned = plan(file, facts(), objective="latency")
    split = [HostPlan(blocks=(0, 2)), HostPlan(blocks=(1, 3))]
    best = best.model_copy(update={"hosts": dict(zip(best.hosts, split, strict=True))})
    for routing, ms in (("order-free", 36), ("replicated-sequential", 56), ("sequential", 56)):
        assert figures_of(best, planned, routing=routing).latency_ms == pytest.approx(ms)


def test_an_accuracy_floor_lengthens_life():
    file = drawn(1)
    best, whole = plan(file, facts(), objective="lifetime")
    shorter, fewer = plan(file, facts(), objective="lifetime", floor=40.0)
    assert (best.most_blocks, shorter.most_blocks) == (None, 2)
    assert fewer.value >= 1.9 * whole.value
    assert figures_of(shorter, fewer, routing="order-free").blocks <= 2
    assert "runs 2 of 4 blocks" in plan_report(shorter, fewer)


def test_mains_have_no_limit():
    file = HostsFile(
        hosts={
            "mains": HostSpec(memory_mb=8),
            "cell": HostSpec(count=2, memory_mb=2, battery_wh=1, watts=2),
        }
    )
    best, planned = plan(file, facts(), objective="lifetime")
    assert planned.value == figures_of(best, planned, routing="order-free").life == math.inf
    assert in_unit(0.0, "throughput") == math.inf


def test_the_plan_is_one_to_deploy(tmp_path):
    best, planned = plan(drawn(2), facts(), objective="throughput", model="dir:x", wire="fp16")
    (tmp_path / "plan.yaml").write_text(plan_text(best), encoding="utf-8")
    assert read_swarm_plan(tmp_path / "plan.yaml") == best
    assert (best.model, best.wire) == ("dir:x", "fp16")
    text = plan_report(best, planned)
    assert f"{figures_of(best, planned, routing='order-free').throughput:,.1f}" in text
    assert f"{planned.value:,.2f} requests/s, which no placement can beat" in text
    assert "not simulated" not in text


def test_a_plan_of_many_hosts_says_why_numbers_are_missing():
    file = HostsFile(hosts={"pi": HostSpec(count=61, memory_mb=4)})
    text = plan_report(*plan(file, facts(), objective="throughput"))
    assert re.search(r"requests per second, all busy +- +-\n", text)
    assert "life are not simulated for more than 60 hosts" in text


def test_units_of_a_hosts_file(tmp_path):
    path = tmp_path / "HOSTS.yaml"
    path.write_text(
        "block_ms: 8\nhosts:\n  pi: {count: 2, memory_mb: 512, speed: 0.25, watts: 4,\n"
        "    battery_wh: 20}\n  box: {memory_mb: 4000, blocks_per_s: 400}\n",
        encoding="utf-8",
    )
    pi, other, box = hosts_of(read_hosts(path), facts(block_ms=None))
    assert (pi.name, other.name, box.name) == ("pi-1", "pi-2", "box")
    assert (pi.block, box.block) == (pytest.approx(0.032), pytest.approx(0.0025))
    assert pi.block_energy == pytest.approx(4 * 0.032)
    assert (pi.battery, box.battery) == (72_000, math.inf)
    path.write_text("hosts: {a: {memory: 3}}", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"memory.*HOSTS\.yaml"):
        read_hosts(path)


def test_facts_of_a_bundle():
    tensors = {1: b"12345", 0: b"1234"}
    assert facts_of(tensors, (17, 64), wire="fp16").state_bytes == 17 * 64 * 2
    assert facts_of(tensors, (17, 64), wire="int8").state_bytes == 17 * 64 + 17 * 4
    assert facts_of(tensors, (17, 64)).block_bytes == (4, 5)
    shared = facts_of({2: b"12345", 0: b"12345", 1: b"1234"}, (17, 64))
    assert (shared.block_bytes, shared.places, shared.depth) == ((5, 4), ((0, 2), (1,)), 3)


def test_accuracy_between_what_was_measured():
    model = facts(depth=6, accuracy={2: 20.0, 6: 80.0})
    assert [model.accuracy_at(k) for k in (0, 2, 3, 6)] == [20, 20, 35, 80]
    assert [model.blocks_for(floor) for floor in (1, 20, 21, 80)] == [1, 1, 3, 6]
    bumpy = facts(accuracy={1: 50.0, 2: 40.0, 3: 60.0, 4: 60.0})
    assert bumpy.blocks_for(45) == 3


# --- infeasible problems --------------------------------------------------------------------------

ROOMY = {"h": HostSpec(count=3, memory_mb=8, availability=0.5)}


@pytest.mark.parametrize(
    ("hosts", "asked", "match"),
    [
        ({"h": HostSpec(count=3, memory_mb=1.5)}, {}, r"short by 1\.00 MB"),
        ({"h": HostSpec(count=3, memory_mb=3)}, {"replicas": 3}, r"short by 3\.00 MB"),
        ({"h": HostSpec(count=9, memory_mb=0.8)}, {}, r"0 of 9 hosts.*short by 0\.20 MB"),
        (ROOMY, {"replicas": 4}, "3 of 3 hosts"),
        (ROOMY, {"reach": 0.9}, r"on every host it is 0\.8750"),
        (ROOMY, {"reach": 1.0}, "between 0 and 1, got 1"),
        (ROOMY, {"replicas": 0}, "at least 1, got 0"),
        (ROOMY, {"objective": "lifetime"}, "No host has a battery"),
        (ROOMY, {"objective": "speed"}, "no objective 'speed'"),
        (ROOMY, {"floor": 50.0}, "belongs to the objective lifetime"),
        ({"h": HostSpec(count=3, memory_mb=2, availability=0.5)}, {"reach": 0.7}, "needs more"),
        ({"h-1": HostSpec(memory_mb=9), "h": HostSpec(count=2, memory_mb=9)}, {}, "named 'h-1'"),
    ],
)
def test_infeasible_plans_name_what_is_short(hosts, asked, match):
    with pytest.raises(UsageError, match=match):
        plan(HostsFile(hosts=hosts), facts(), **{"objective": "throughput", **asked})


def test_copies_that_fit_in_sum_and_not_in_parts():
    """16 MB of blocks, 18 MB of memory; but no host of 4.5 MB holds two of the 3 MB blocks."""
    file = HostsFile(hosts={"h": HostSpec(count=4, memory_mb=4.5)})
    sizes = (3 * MB, 3 * MB, 2 * MB)
    with pytest.raises(UsageError, match="2 copies of every block do not fit"):
        plan(file, facts(block_bytes=sizes), objective="throughput", replicas=2)


def test_floors_and_speeds_that_are_not_known():
    with pytest.raises(UsageError, match=r"out of reach: all 4 blocks give 70\.0 %"):
        plan(drawn(0), facts(), objective="lifetime", floor=71.0)
    with pytest.raises(UsageError, match="swarm calibrate"):
        plan(drawn(0), facts(accuracy={}), objective="lifetime", floor=71.0)
    with pytest.raises(UsageError, match="how fast host h0 is"):
        plan(drawn(0), facts(block_ms=None), objective="latency")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"speed": 1, "blocks_per_s": 2}, "exclude each other"),
        ({"watts": 1, "joules_per_block": 2}, "exclude each other"),
        ({"battery_wh": 1}, "battery_wh needs watts"),
        ({"availability": 0}, "availability"),
    ],
)
def test_hosts_that_contradict_themselves(fields, match):
    with pytest.raises(SettingsError, match=match):
        HostSpec(memory_mb=1, **fields)


def test_without_time_the_greedy_answers():
    file = drawn(3, hosts=8, depth=8, radio=True)
    best, planned = plan(file, facts(depth=8), objective="lifetime", time_limit=1e-3)
    best.check(8)
    assert planned.solution.solver == "greedy"
    assert planned.value <= planned.bound * (1 + 1e-6)
