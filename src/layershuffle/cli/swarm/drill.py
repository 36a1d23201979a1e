"""`layershuffle swarm drill`: rehearse failures on a running swarm, and judge its answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layershuffle.cli.swarm import FAULT_KINDS, FaultFlag, RoutingFlag, ScenarioFlag
from layershuffle.cli.swarm.asking import ServerOptions, client_options, server_flags
from layershuffle.cli.swarm.serving import state_flag
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.extras import require

if TYPE_CHECKING:
    from layershuffle.swarm.calibration import Calibration
    from layershuffle.swarm.chaos import Fault, FaultKind
    from layershuffle.swarm.client import AsyncSwarmClient
    from layershuffle.swarm.load_client import Labelled
    from layershuffle.swarm.server.admin import Operator

# Longer than the longest pause (`Limits.restart_max_ms`) and the start after it
# (`Limits.start_ms`), so that hosts of a slow machine that are starting are not given up.
_BACK_SECONDS, _POLL_SECONDS = 180.0, 0.1


@dataclass(frozen=True, kw_only=True)
class DrillCommand(ServerOptions):
    """Send labelled images to a running swarm while its own hosts fail, as a seed says.

    Then bring the hosts back, and print how the requests ended. Run this on the machine of the
    server.
    """

    requests: int = 300
    """Number of requests, per routing."""
    kinds: tuple[FaultFlag, ...] = FAULT_KINDS
    """Failures to rehearse, one after the other; rejoin brings each host back after a while."""
    scenarios: tuple[ScenarioFlag, ...] = ()
    """Instead of --kinds, run these failures, from which the swarm must recover by itself, one
    after the other: kill all hosts, or all but one; let a host answer wrongly always, in 1 % of its
    answers, or always except for canaries; open connections that never read their answers."""
    kill: float | None = None
    """Instead of --kinds, kill this share of the hosts at random moments, for good."""
    routings: tuple[RoutingFlag, ...] = ()
    """Routings to compare, under the same requests and failures (default: that of the swarm)."""
    data: str | None = None
    """Labelled images: the test split of this data. Default: the data of the calibration; the
    accuracy on other images is not known."""
    deadline_ms: float = 2000.0
    """Deadline of every request, in milliseconds."""
    concurrency: int = 4
    """Number of requests at a time."""
    seed: int = 0
    """Seed of the failures."""
    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""
    json: bool = False
    """Print JSON at the end; progress goes to standard error."""

    def run(self) -> int:
        """Drill; exit code 1 if a request was lost or late in free order."""
        require("swarm")

        from layershuffle.swarm.server.admin import operator_of

        if self.scenarios and self.kill is not None:
            raise UsageError("--scenarios and --kill exclude each other", hint="give one of them")
        with operator_of(self.state) as operator:
            facts = operator.command("facts")
            if not facts["hosts"]:
                raise UsageError(
                    "The swarm has started no hosts, and others' are not broken",
                    hint="layershuffle swarm up --hosts 4",
                )
            return asyncio.run(self.drill(facts, operator))

    async def drill(self, facts: Mapping[str, Any], operator: Operator) -> int:
        """The drill of the swarm of `operator` with these facts; the exit code."""
        from layershuffle.models import load
        from layershuffle.swarm.calibration import calibration_of
        from layershuffle.swarm.chaos import crashes_text
        from layershuffle.swarm.client import AsyncSwarmClient
        from layershuffle.swarm.drill import (
            calibrated_data,
            drill_json,
            drill_report,
            judged,
            run_drill,
            why_not_judged,
        )
        from layershuffle.swarm.load_client import labelled_images, load_client
        from layershuffle.swarm.served import ServedModel, served_directory

        hosts, spec = facts["hosts"], facts["model"]
        stored = calibration_of(ServedModel(served_directory(spec)))
        data = self.data or calibrated_data(stored, model=spec)
        why = why_not_judged(stored, data=data)
        calibration = None if why else stored
        # More requests than a thousand send the same images again.
        images = labelled_images(load(spec), data, count=min(self.requests, 1000))
        if self.scenarios:
            if why:
                self.say(f"Accuracy not judged: {why}")
            return await self._play(hosts, operator, images, calibration)
        faults = self._faults(hosts)
        if self.kill is not None:
            self.say(crashes_text(faults, share=self.kill, hosts=len(hosts)))
        self.say(
            "\n".join(f"before request {fault.at}: {fault.kind} {fault.host}" for fault in faults)
        )
        routings = self.routings or (facts["routing"],)
        lost, reports = 0.0, []
        # A drill that fails or is interrupted must leave the swarm as it was: faults are mended,
        # and the clients of the running service get the routing back that they had.
        routing_before = operator.command("routing", routing=routings[0])["before"]
        async with AsyncSwarmClient(*self.address, patience=0, **client_options(self)) as client:
            ask = load_client(client, images, deadline_ms=self.deadline_ms)
            engine = _Remote(operator, client, cure=self._cure(), say=self.say)
            try:
                for routing in routings:
                    operator.command("routing", routing=routing)
                    try:
                        drill = await run_drill(
                            ask,
                            self.requests,
                            faults=faults,
                            engine=engine,
                            concurrency=self.concurrency,
                        )
                        replies = list(drill.replies.values())
                        verdict = judged(replies, calibration) if calibration else why
                        reports.append(drill_json(drill, judgement=verdict, routing=routing))
                        # Text at once: people wait for each routing.
                        if not self.json:
                            text = drill_report(drill, judgement=verdict, routing=routing)
                            print(f"\n{text}", flush=True)
                        if calibration and any(fault.kind == "wrong" for fault in faults):
                            self.say(
                                "One host gave wrong answers for a while; those given until it was "
                                "found count."
                            )
                        # A fixed order cannot but lose requests: only free order counts.
                        if routing == "order-free":
                            lost = max(lost, drill.share("failed", "late"))
                    finally:
                        await engine.mend()
            finally:
                operator.command("routing", routing=routing_before)
        if self.json:
            print(json.dumps({"hosts": len(hosts), "routings": reports}, indent=2))
        return 1 if lost else 0

    def say(self, text: str) -> None:
        """Print what happens: with --json to standard error, so that the output stays JSON."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def _cure(self) -> str:
        return (
            f"layershuffle swarm status{server_flags(self)} says why, layershuffle swarm readmit "
            f"HOST{state_flag(self.state)} starts a host again"
        )

    async def _play(
        self,
        hosts: Sequence[str],
        operator: Operator,
        images: Sequence[Labelled],
        calibration: Calibration | None,
    ) -> int:
        """The scenarios, one after the other; exit code 1 if one of them was not passed."""
        from layershuffle.cli.swarm.local_faults import RunningSwarm
        from layershuffle.swarm.chaos import Fault
        from layershuffle.swarm.client import AsyncSwarmClient
        from layershuffle.swarm.load_client import load_client
        from layershuffle.swarm.scenarios import (
            LIES,
            ScenarioResult,
            play,
            scenario_json,
            scenario_report,
        )

        results: list[ScenarioResult] = []
        async with AsyncSwarmClient(*self.address, patience=0, **client_options(self)) as client:
            ask = load_client(client, images, deadline_ms=self.deadline_ms, patient=True)
            engine = _Remote(operator, client, cure=self._cure(), say=self.say)
            swarm = RunningSwarm(operator, client, address=self.address[0])
            for scenario in self.scenarios:
                self.say(f"{scenario} ...")
                try:
                    results.append(
                        await play(
                            scenario,
                            hosts,
                            swarm=swarm,
                            ask=ask,
                            requests=self.requests,
                            calibration=calibration,
                            concurrency=self.concurrency,
                        )
                    )
                finally:
                    swarm.close()
                    # A liar that was caught stays out until it is readmitted.
                    if scenario in LIES:
                        await engine.inject(Fault(0, hosts[-1], "rejoin"))
        if self.json:
            rows = [scenario_json(result) for result in results]
            print(json.dumps({"hosts": len(hosts), "scenarios": rows}, indent=2))
        else:
            print(scenario_report(results))
        return 0 if all(result.passed for result in results) else 1

    def _faults(self, hosts: Sequence[str]) -> tuple[Fault, ...]:
        from layershuffle.swarm.chaos import crashes, one_of_each_fault

        if self.kill is not None:
            return crashes(hosts, share=self.kill, requests=self.requests, seed=self.seed)
        return one_of_each_fault(hosts, requests=self.requests, seed=self.seed, kinds=self.kinds)


class _Remote:
    """The hosts of a running swarm, by the operator's commands (`drill.Engine`).

    `cure`: what to type where hosts stay away. `say` prints what happens.
    """

    def __init__(
        self,
        operator: Operator,
        client: AsyncSwarmClient,
        *,
        cure: str,
        say: Callable[[str], None],
    ) -> None:
        self._operator, self._client, self._cure, self._say = operator, client, cure, say
        self._hit: set[str] = set()
        self._order: asyncio.Future[None] | None = None

    async def inject(self, fault: Fault) -> None:
        """Make the fault happen; a rejoin is over when the host is healthy."""
        self._hit.add(fault.host)
        self._order = asyncio.ensure_future(self._ordered(fault.host, fault.kind))
        await asyncio.shield(self._order)  # its thread goes on: `mend` comes after it
        if fault.kind == "rejoin":
            await self.healthy({fault.host})

    async def healthy(self, hosts: set[str]) -> None:
        """Wait until these hosts are healthy. Raises `LayerShuffleError` if they stay away."""
        away = hosts
        try:
            async with asyncio.timeout(_BACK_SECONDS):
                while away:
                    swarm = await self._client.swarm()
                    away = hosts - {h.name for h in swarm.hosts if h.condition == "healthy"}
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise self._stayed_away(away) from error

    async def mend(self) -> None:
        """Bring every host back that a fault hit. Raises `LayerShuffleError` for those that stay
        away, after all others were seen to.
        """
        # A fault that is still on its way would otherwise hit after its own mending.
        if self._order is not None:
            await asyncio.wait({self._order}, timeout=_BACK_SECONDS)
        hit, self._hit = sorted(self._hit), set()
        if hit:
            self._say(f"Bringing back {', '.join(hit)}.")
        # All at once: hosts that start one after the other would each have to be waited for.
        orders = [asyncio.ensure_future(self._ordered(name, "rejoin")) for name in hit]
        if orders:
            await asyncio.wait(orders, timeout=_BACK_SECONDS)
        if late := {name for name, order in zip(hit, orders, strict=True) if not order.done()}:
            raise self._stayed_away(late)
        if errors := [error for order in orders if (error := order.exception())]:
            raise errors[0]
        await self.healthy(set(hit))

    async def _ordered(self, host: str, kind: FaultKind) -> None:
        # The operator's client blocks, and the requests must go on meanwhile.
        await asyncio.to_thread(self._operator.command, "fault", host=host, kind=kind)

    def _stayed_away(self, hosts: set[str]) -> LayerShuffleError:
        return LayerShuffleError(
            f"{', '.join(sorted(hosts))} did not come back within {_BACK_SECONDS:g} s",
            hint=self._cure,
        )
