"""The settings of a swarm, and plans: which blocks run on which host. Plain data, no torch.

model: runs/depth/model
hosts:
  pi-1: {blocks: [0, 5, 7]}
  pi-2: {blocks: [1, 2]}
routing: order-free
most_blocks: 9                 # saves battery: requests leave out the other blocks
wire: fp32
limits: {deadline_ms: 1000}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, model_validator

from layershuffle.errors import SettingsError, UsageError
from layershuffle.settings import BlockId, Name, Positive, Settings, read_recipe
from layershuffle.swarm.assignment import COPIES
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Wire
from layershuffle.swarm.policy import Routing

DEFAULT_MODEL = "bundled:digits-onnx"


class HostPlan(Settings):
    """The blocks of one host."""

    blocks: Annotated[tuple[BlockId, ...], Field(min_length=1)]
    """Ids of its blocks, each once."""

    @model_validator(mode="after")
    def _consistent(self) -> HostPlan:
        twice = sorted({block for block in self.blocks if self.blocks.count(block) > 1})
        if twice:
            raise ValueError(f"block {twice[0]} is named twice")
        return self


class SwarmSettings(Settings):
    """How a gateway serves a model."""

    model: str = DEFAULT_MODEL
    """Model whose blocks the hosts hold."""
    copies: Annotated[int, Field(ge=1)] = COPIES
    """Hosts that hold each block, where they have room."""
    routing: Routing = "order-free"
    """order-free or sequential."""
    parallel: Positive | None = None
    """order-free: most visits of a request in flight; default: the most that cost no accuracy
    according to the calibration, or 1 without one."""
    most_blocks: Positive | None = None
    """Number of blocks that is enough for a request in free order; default: all."""
    wire: Wire = "fp32"
    """Type of states on the wire: fp32, fp16 or int8."""
    limits: Limits = Limits()
    """Time-outs and bounds."""


class SwarmPlan(SwarmSettings):
    """A swarm whose hosts hold the same blocks all the time, for simulations."""

    hosts: Annotated[dict[Name, HostPlan], Field(min_length=1)]
    """Blocks of every host, by its name."""

    def check(self, depth: int) -> None:
        """Raises `UsageError` for blocks that the model lacks, or that no host holds."""
        if self.most_blocks is not None and self.most_blocks > depth:
            raise UsageError(
                f"most_blocks is {self.most_blocks}, but the model has {depth} blocks",
                hint=f"set it to at most {depth} in the plan, or leave it out",
            )
        for name, host in self.hosts.items():
            over = [block for block in host.blocks if block >= depth]
            if over:
                raise UsageError(
                    f"Host {name} is to hold block {over[0]}, the model's last is {depth - 1}",
                    hint="name existing blocks",
                )
        everywhere = {block for host in self.hosts.values() for block in host.blocks}
        missing = sorted(set(range(depth)) - everywhere)
        if missing:
            raise UsageError(
                f"No host holds block {', '.join(map(str, missing))}",
                hint="give every block to a host; `layershuffle swarm plan` makes a whole plan",
            )


def read_swarm_plan(path: Path) -> SwarmPlan:
    """The plan in a YAML file. Raises `UsageError` or `SettingsError` with the file's path."""
    try:
        # pydantic names the wrong key, but cannot know the file.
        return SwarmPlan(**read_recipe(path))
    except SettingsError as error:
        raise SettingsError(error.cause, place=path, hint=error.hint) from error


def plan_text(plan: SwarmPlan) -> str:
    """The plan as YAML for `read_swarm_plan`, without values that are the default."""
    data = plan.model_dump(mode="json", exclude_defaults=True)
    # With None, lists of numbers are written in one line.
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True)
