"""What may happen to the hosts of a swarm, and the scenarios that simulations and
`benchmarks/swarm_drill.py` play."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "crash", "kill", "freeze", "slow", "wrong", "wrong-rarely", "wrong-but-canaries", "cut",
    "lossy", "restless", "leave", "rejoin",
]  # fmt: skip
"""What may happen to a host.

crash               its process is killed, and started again by its rejoin alone
kill                its process is killed, and started again
freeze              its process stops silently
slow                its compute takes ten times as long, and visits wait for one another
wrong               its answers are finite and false, the same for equal states
wrong-rarely        one answer of a hundred is false, but none to a canary
wrong-but-canaries  all its answers are false, except those to canaries
cut                 its network fails silently: neither visits nor answers arrive
lossy               each message takes 200 ms, and of five one is lost and sent again
restless            its connection ends every second, and it dials in again
leave               its process gets SIGTERM: it drains itself, and ends
rejoin              a crashed, left or shut-out host comes back; the faults of any other one end
"""
ScenarioName = Literal[
    "third", "all-but-one", "all", "frozen", "slow", "cut", "lossy", "restless", "leaving", "liar",
    "rare-liar", "canary-liar",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """Just before request number `at` is sent, `kind` happens to `host`."""

    at: int
    host: str
    kind: FaultKind


@dataclass(frozen=True, slots=True)
class Scenario:
    """`kind` happens to the hosts that `victims` chooses of all, after a quarter of the requests.

    `lasts`: until it is mended, after half of the requests.
    """

    kind: FaultKind
    victims: Callable[[Sequence[str]], Sequence[str]] = lambda hosts: hosts[-1:]
    lasts: bool = False

    def faults(self, hosts: Sequence[str], *, requests: int) -> tuple[Fault, ...]:
        """The same as a list, for so many requests."""
        quarter, victims = requests // 4, self.victims(hosts)
        begins = [Fault(quarter, host, self.kind) for host in victims]
        ends = [Fault(3 * quarter, host, "rejoin") for host in victims if self.lasts]
        return (*begins, *ends)


SCENARIOS: Mapping[ScenarioName, Scenario] = {
    "third": Scenario("crash", lambda hosts: hosts[-max(1, len(hosts) // 3) :], lasts=True),
    "all-but-one": Scenario("kill", lambda hosts: hosts[1:]),
    "all": Scenario("kill", lambda hosts: hosts),
    "frozen": Scenario("freeze", lasts=True),
    "slow": Scenario("slow", lasts=True),
    "cut": Scenario("cut", lasts=True),
    "lossy": Scenario("lossy", lasts=True),
    "restless": Scenario("restless", lasts=True),
    "leaving": Scenario("leave", lasts=True),
    "liar": Scenario("wrong"),
    "rare-liar": Scenario("wrong-rarely"),
    "canary-liar": Scenario("wrong-but-canaries"),
}
