"""The JSON of a gateway's answers.

It imports no torch and no web framework, because clients read answers with the same classes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from layershuffle.gateway.brain.policy import Ending
from layershuffle.gateway.brain.state import Condition, HostState, Outcome
from layershuffle.gateway.calibration.calibration import Expected

_MILLI = 1000.0


def encodable(text: str) -> str:
    """The text of an error without half surrogate pairs, which JSON and logs cannot hold.

    A file name may have them. In what hosts say the protocol refuses them.
    """
    return text.encode("utf-8", "replace").decode()


FixedEnds = Annotated[
    tuple[int, int],
    Field(
        description="How many blocks at the beginning and at the end of the model keep their "
        "place. The gateway runs them with stem and head for every answer, and no host serves one."
    ),
]


class Guess(BaseModel):
    """A class and its probability (0 to 1)."""

    label: str
    index: int
    probability: float


class Hop(BaseModel):
    """One visit to one host, with its times in milliseconds.

    `begun_ms` is the time from the beginning of the walk to that of the visit. `ms` is the time of
    the whole visit, `compute_ms` of its computation, `queue_ms` of its waiting at the host.
    """

    model_config = ConfigDict(from_attributes=True)  # of `state.Visited`

    host: str
    block: int
    outcome: Outcome
    begun_ms: float
    ms: float
    compute_ms: float
    queue_ms: float
    why: str = Field("", description='The reason, if the outcome is not "answered".')


class Skipped(BaseModel):
    """A block that did not run."""

    block: int
    why: str


class Times(BaseModel):
    """Milliseconds since the request was complete, and of the parts of the model's forward."""

    total: float
    stem: float
    swarm: float
    head: float


class Classification(BaseModel):
    """The answer to a classification, with the route it took."""

    top: list[Guess] = Field(description="The most probable classes, best first.")
    chance: float | None = Field(
        None,
        description="That the first class is right, as measured on held-out images; `null` if that "
        "was never measured.",
    )
    depth: int = Field(description="Number of blocks of the model.")
    fixed: FixedEnds = (0, 0)
    blocks: list[int] = Field(description="Blocks that ran on hosts, in execution order.")
    versions: list[int] = Field(
        description="The version of the state that each block read; version k is the state after "
        "k steps. A block that read an older version added its residual to the newest."
    )
    skipped: list[Skipped]
    degraded: bool = Field(description="Whether blocks that were to run are missing.")
    ending: Ending
    route: list[Hop]
    expected: Expected | None
    expected_why: str = Field("", description="Why there is no expected accuracy.")
    ms: Times


class HostAnswer(BaseModel):
    """One host as the router sees it; averages in milliseconds, `null` until measured."""

    name: str
    condition: Condition
    why: str
    blocks: list[int]
    compute_ms: float | None = Field(description="Average per block.")
    link_ms: float | None = Field(description="Average per visit, beyond compute and queue.")
    waiting: int = Field(description="Blocks sent to it and not answered yet.")
    visits: int = Field(description="Visits to it since the gateway started.")
    started_here: bool = Field(
        False, description="Whether it is a process that this gateway started."
    )

    @classmethod
    def from_state(cls, host: HostState, *, visits: int, started_here: bool) -> HostAnswer:
        """The answer on `host`, as the router sees it."""
        return cls(
            name=host.name,
            condition=host.condition,
            why=host.why,
            blocks=sorted(host.blocks),
            compute_ms=None if host.compute is None else host.compute * _MILLI,
            link_ms=None if host.link is None else host.link * _MILLI,
            waiting=host.waiting,
            visits=visits,
            started_here=started_here,
        )


class Audits(BaseModel):
    """Visits that were computed again at the gateway and compared."""

    audited: int
    disagreed: int = Field(description="Audits whose answers differed.")


class SwarmAnswer(BaseModel):
    """The current state of the swarm."""

    model: str
    depth: int
    fixed: FixedEnds = (0, 0)
    unreachable_blocks: list[int] = Field(description="Blocks that no usable host holds.")
    hosts: list[HostAnswer]
    counters: dict[str, int] = Field(description="Requests by outcome since the start.")
    audits: Audits = Field(description="Since the start.")
    expected: Expected | None = Field(
        None, description="Of answers with all blocks that are reachable now."
    )
    expected_why: str = Field("", description="Why there is no expected accuracy.")


class Health(BaseModel):
    """Whether requests can be answered, if only in part."""

    ok: bool
    why: str


class Problem(BaseModel):
    """What went wrong and what to do next; `id` marks an unexpected failure in the log."""

    cause: Annotated[str, AfterValidator(encodable)]
    hint: str
    id: str | None = None


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: Problem
