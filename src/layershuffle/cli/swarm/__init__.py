"""The commands of `layershuffle swarm`, and `classify`; here the names that their flags share."""

from __future__ import annotations

from typing import Literal, get_args

# Flags need these names for --help. The modules that own them (swarm.policy, messages, service)
# import pydantic and numpy, which take 0.15 to 0.24 s of the half second that --help may take. So
# they are spelled out once more; a test and mypy compare them.
DEFAULT_MODEL, CALIBRATED_MODEL = "bundled:digits-onnx", "bundled:digits-swarm"
RoutingFlag = Literal["order-free", "sequential"]
WireFlag = Literal["fp32", "fp16", "int8"]
ROUTINGS: tuple[RoutingFlag, ...] = get_args(RoutingFlag)
