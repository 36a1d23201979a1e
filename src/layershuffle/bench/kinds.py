"""The kinds of `layershuffle bench` by name."""

from collections.abc import Callable, Mapping

from layershuffle.bench.choices import Chosen, choose
from layershuffle.bench.forwards import bench_eval
from layershuffle.bench.merge import bench_merge
from layershuffle.bench.orders import bench_orders
from layershuffle.bench.reading import bench_input
from layershuffle.bench.report import Report
from layershuffle.bench.train import bench_train

__all__ = ["BENCHES", "choose"]

BENCHES: Mapping[str, Callable[[Chosen], Report]] = {
    "train": bench_train,
    "eval": bench_eval,
    "orders": bench_orders,
    "input": bench_input,
    "merge": bench_merge,
}
