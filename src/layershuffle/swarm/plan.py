"""The swarm's plan: which blocks run on which host. Plain data, no torch.

model: runs/depth/model        # stem and head stay here, beside the server
hosts:
  pi-1: {blocks: [0, 5, 7]}
  pi-2: {blocks: [1, 2]}
routing: order-free
most_blocks: 9                 # saves battery: requests leave out the other blocks
wire: fp32
limits: {deadline_ms: 1000}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, model_validator

from layershuffle.bundled import asset
from layershuffle.errors import SettingsError, UsageError
from layershuffle.settings import BlockId, Name, Positive, Settings, read_recipe
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Wire
from layershuffle.swarm.policy import Routing

DEFAULT_MODEL = "bundled:digits-onnx"
_MAX_DEPTH = 1024


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


class SwarmPlan(Settings):
    """A swarm: model, hosts and how it routes."""

    model: str = DEFAULT_MODEL
    """Model whose stem and head the server runs."""
    hosts: Annotated[dict[Name, HostPlan], Field(min_length=1)]
    """Blocks of every host, by its name."""
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

    def with_tied_places(self, digests: Mapping[int, str]) -> SwarmPlan:
        """This plan, in which a host that holds a block can run all places with its weights.

        `digests`: of the weights of every place of the plan's model.
        """
        hosts = {}
        for name, host in self.hosts.items():
            weights = {digests[block] for block in host.blocks}
            tied = (
                place
                for place in sorted(digests)
                if digests[place] in weights and place not in host.blocks
            )
            hosts[name] = host.model_copy(update={"blocks": (*host.blocks, *tied)})
        return self.model_copy(update={"hosts": hosts})


def even_plan(
    depth: int, hosts: int, *, model: str = DEFAULT_MODEL, replicas: int = 1
) -> SwarmPlan:
    """A plan for equal hosts `host-1`...: block b on hosts b, b + 1, ... modulo `hosts`.

    Raises `UsageError` for more replicas than hosts, or hosts that would hold nothing.
    """
    if not 1 <= replicas <= hosts:
        raise UsageError(
            f"{replicas} replicas do not fit {hosts} hosts",
            hint=f"ask for at most {hosts} (--replicas), or for more --hosts",
        )
    blocks_of: dict[int, list[int]] = {host: [] for host in range(hosts)}
    for block in range(depth):
        # Copies go to the hosts that follow, so that the work of a dead host falls to several
        # others.
        for copy in range(replicas):
            blocks_of[(block + copy) % hosts].append(block)
    if not all(blocks_of.values()):
        raise UsageError(
            f"{hosts} hosts are too many for {depth} blocks", hint="take fewer, or more replicas"
        )
    return SwarmPlan(
        model=model,
        hosts={f"host-{host + 1}": HostPlan(blocks=tuple(ids)) for host, ids in blocks_of.items()},
    )


def noted_depth(model: str) -> int | None:
    """The number of blocks in the metadata of a saved model, read without torch.

    `None` if it cannot be read. Nothing is checked here: loading the model reports its errors, and
    `SwarmPlan.check` those of its blocks.
    """
    scheme, _, place = model.partition(":")
    if scheme == "bundled":
        directory = asset(place)
    else:  # a directory, or a model that has no record, and no directory of that name either
        directory = Path(model.removeprefix("dir:")).expanduser()
    with suppress(OSError, ValueError):
        metadata = json.loads((directory / "layershuffle.json").read_text(encoding="utf-8"))
        depth = metadata.get("depth") if isinstance(metadata, dict) else None
        # A plan lists its blocks, so an absurd number is left to the loader's checks.
        return depth if type(depth) is int and 0 < depth <= _MAX_DEPTH else None
    return None


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
