"""Scores equal a slow path that runs every order by itself and counts with plain Python."""

import dataclasses
import gc
import math
import sys
import weakref
from collections import Counter
from itertools import combinations

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

import layershuffle as ls
from common import CLASSES, FAMILIES, images, logits_of
from layershuffle.core.evaluation import Tally, evaluate
from layershuffle.core.forwards import block_runs, forward_many, images_at_once
from layershuffle.core.policies import parse_modes
from layershuffle.core.stack import running
from layershuffle.core.tensors import state_of
from layershuffle.data import Split
from layershuffle.ground.errors import DataError, StackError, UsageError
from layershuffle.ground.machine import collector_paused
from layershuffle.ground.stats import independent_images
from layershuffle.models.stem_head import refuse_more_than_blocks, run_head, run_stem
from layershuffle.scoring.evaluate_spec import evaluate_spec, score_rows
from layershuffle.scoring.settings import EvalSettings
from own_models import CHAINS, CUTTING, LOOPS
from refusals import refuses

VIT = FAMILIES["timm-vit"]
BATCHES = [(images(3, seed=s), torch.tensor([0, 1, 2]) + s % 3) for s in range(3)] + [
    (images(1, seed=9), torch.tensor([4]))
]


def slow_score(model, order_at):
    """(top-1, top-5, cross-entropy) counted sample by sample."""
    right, among, loss, n = 0, 0, 0.0, 0
    for number, (batch, labels) in enumerate(BATCHES):
        with torch.inference_mode(), running(model, order_at(number)):
            rows = logits_of(model(batch)).tolist()
        for row, label in zip(rows, labels.tolist(), strict=True):
            better = sum(value > row[label] for value in row)
            right += better == 0
            among += better < 5
            loss += math.log(sum(math.exp(v - max(row)) for v in row)) + max(row) - row[label]
            n += 1
    return 100 * right / n, 100 * among / n, loss / n


def test_equal_to_the_slow_path():
    model = VIT.wrapped()
    modes = parse_modes("sequential,arbitrary,kept:2,kept:3:arbitrary,kept:2:sequential:spaced")
    scores = evaluate(model, BATCHES, modes=modes, num_orders=3, seed=4)
    assert [s.mode for s in scores] == [m for m in modes for _ in range(3 if m.is_drawn(4) else 1)]
    for score in scores:
        top1, top5, loss = slow_score(model, lambda _, order=score.order: order)
        assert score.order == score.mode.policy().draw(4, seed=4, step=score.index)
        assert (score.top1, score.top5, score.images) == (top1, top5, 10)
        assert score.cross_entropy == pytest.approx(loss, rel=1e-5)


def test_all_blocks_kept_in_their_order_are_one_order():
    scores = evaluate(VIT.wrapped(), BATCHES, modes="kept:4,kept:3", num_orders=3, draw="batch")
    assert [(score.kept, len(score.batch_orders)) for score in scores] == [
        (4, 0),
        *[(3, len(BATCHES))] * 3,
    ]
    assert str(scores[0].order) == "0,1,2,3"


def test_one_order_per_batch():
    model = VIT.wrapped()
    (mode,) = parse_modes("arbitrary")
    scores = evaluate(model, BATCHES, modes=[mode], num_orders=2, seed=1, draw="batch")
    for score in scores:
        assert score.order is None
        assert score.batch_orders == tuple(
            ls.Shuffled().draw(4, seed=1, step=batch, micro_batch=score.index)
            for batch in range(len(BATCHES))
        )
        top1, top5, loss = slow_score(
            model,
            lambda batch, index=score.index: ls.Shuffled().draw(
                4, seed=1, step=batch, micro_batch=index
            ),
        )
        assert (score.top1, score.top5) == (top1, top5)
        assert score.cross_entropy == pytest.approx(loss, rel=1e-5)


def test_the_data_are_read_once():
    reads = []

    def batches():
        for number, batch in enumerate(BATCHES):
            reads.append(number)
            yield batch

    evaluate(VIT.wrapped(), batches(), modes=["sequential", "arbitrary,kept:3"], num_orders=5)
    assert reads == [0, 1, 2, 3]


def test_every_module_comes_back_in_its_own_mode():
    """A part in eval mode stays in eval mode in a model in training mode."""
    model = VIT.wrapped().train()
    model.patch_embed.eval()
    evaluate(model, BATCHES, modes="sequential")
    assert not model.patch_embed.training
    assert model.training
    assert model.norm.training


WRONG_LABELS = {
    "one-hot": torch.eye(CLASSES)[:3],
    "whole one-hot": torch.eye(CLASSES, dtype=torch.int64)[:3],
    "fractions": torch.tensor([0.0, 1.0, 2.0]),
    "truths": torch.tensor([True, False, True]),
    "column": torch.tensor([[0], [1], [2]]),
    "too few": torch.tensor([0, 1]),
    "too high": torch.tensor([0, CLASSES, 2]),
    "ignored by torch": torch.tensor([0, -100, -1]),
}


BATCHES_WITHOUT = {name: (images(3), labels) for name, labels in WRONG_LABELS.items()}
BATCHES_WITHOUT |= {"no labels": images(3), "a mapping": {"pixel_values": images(3)}}


@pytest.mark.parametrize("batch", BATCHES_WITHOUT.values(), ids=list(BATCHES_WITHOUT))
def test_batches_without_classes_are_refused(batch):
    with refuses(DataError):
        evaluate(VIT.wrapped(), [batch], modes="sequential")


def test_labels_of_any_whole_type_score_alike():
    (wanted,) = evaluate(VIT.wrapped(), BATCHES, modes="sequential")
    for dtype in (torch.uint8, torch.int32):
        typed = [(batch, labels.to(dtype)) for batch, labels in BATCHES]
        assert evaluate(VIT.wrapped(), typed, modes="sequential") == [wanted]


class Reads(TorchDispatchMode):
    """Counts operations that make the host wait for a number from a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_before_all_is_added_up():
    generator = torch.Generator().manual_seed(0)
    tally, loss = Tally(), 0.0
    batches = [
        (torch.randn(n, 9, generator=generator), torch.arange(n) % 9) for n in (7, 50, 1, 300)
    ]
    with Reads() as reads:
        for logits, labels in batches:
            tally.add(logits, labels)
        assert reads.count == 0
        values = tally.values()
        assert reads.count == 3
    for logits, labels in batches:
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    assert values["cross_entropy"] == loss / 358  # to the last bit


def test_a_batch_is_scored_in_parts_that_fit_the_cache(monkeypatch):
    model, seen = VIT.wrapped(), []
    whole = evaluate(model, BATCHES, modes="arbitrary,kept:2", num_orders=3)
    ls.blocks_of(model)[0].register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    monkeypatch.setattr("layershuffle.core.forwards._CACHED_BYTES", 1)
    monkeypatch.setattr("layershuffle.core.forwards._LEAST_IMAGES", 2)
    parts = evaluate(model, BATCHES, modes="arbitrary,kept:2", num_orders=3)
    assert set(seen) == {1, 2}
    for score, other in zip(whole, parts, strict=True):
        assert (score.order, score.images, score.top1) == (other.order, other.images, other.top1)
        assert score.cross_entropy == pytest.approx(other.cross_entropy, rel=1e-6)


def test_autocast_around_it_runs_the_blocks_in_bf16():
    """As in the scoring of held-out images during training."""
    model, dtypes = VIT.wrapped(), set()
    (exact,) = evaluate(model, BATCHES, modes="sequential")
    mlp = next(m for m in ls.blocks_of(model)[0].modules() if isinstance(m, torch.nn.Linear))
    mlp.register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        (rough,) = evaluate(model, BATCHES, modes="sequential")
    assert dtypes == {torch.bfloat16}
    assert rough.cross_entropy == pytest.approx(exact.cross_entropy, rel=0.02)


def test_nothing_to_evaluate():
    with refuses(DataError):
        evaluate(VIT.wrapped(), [], modes=parse_modes("sequential"))
    batches = iter(BATCHES)
    with refuses(DataError):
        evaluate(VIT.wrapped(), batches)
    assert len(list(batches)) == len(BATCHES)


def test_a_model_without_a_classifier_has_no_accuracy():
    model = ls.load("timm:vit_tiny_patch16_224?pretrained=false&depth=2&num_classes=0&img_size=32")
    with refuses(UsageError):
        evaluate(model, [(torch.zeros(1, 3, 32, 32), torch.tensor([0]))], modes="sequential")


def test_a_head_around_a_backbone_without_one_is_scored():
    class Probe(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = VIT.plain()
            self.backbone.reset_classifier(0)
            self.head = torch.nn.Linear(self.backbone.embed_dim, CLASSES)

        def forward(self, pixels):
            return self.head(self.backbone(pixels))

    assert len(evaluate(ls.wrap(Probe()), BATCHES, modes="sequential")) == 1


@pytest.mark.parametrize("wrong", [{"draw": "batches"}, {"num_orders": 0}])
def test_draws_that_mean_nothing_are_refused(wrong):
    with refuses(UsageError):
        evaluate(VIT.wrapped(), BATCHES, modes="sequential,arbitrary", **wrong)


def test_a_fixed_order_is_replayed():
    model = VIT.wrapped()
    drawn = evaluate(model, BATCHES, modes=parse_modes("arbitrary"), num_orders=2, seed=3)[1]
    given = [drawn.order, "3,0,3", "2,0"]
    replay, repeats, subset = evaluate(model, BATCHES, orders=given, draw="batch")
    assert (replay.top1, replay.top5, replay.cross_entropy) == (
        drawn.top1, drawn.top5, drawn.cross_entropy
    )  # fmt: skip
    assert [score.mode for score in (replay, repeats, subset)] == [None] * 3
    assert (repeats.label, repeats.kept) == ("order:3,0,3", 3)
    assert (subset.top1, subset.cross_entropy) == pytest.approx(
        slow_score(model, lambda _: "2,0")[::2], rel=1e-5
    )


@pytest.mark.parametrize("stop", [0.35, 0.45, 1.0])
def test_an_image_stops_where_its_largest_probability_reaches_the_threshold(stop):
    """Against every beginning of every order run alone, image by image; also in rounds."""
    model = VIT.wrapped()
    orders = ["3,0,2,1", "2+1,0+3", "0,3@0,1,2", "3,0,2,1"]
    scores = evaluate(model, BATCHES, orders=orders, modes="arbitrary", num_orders=3, stop=stop)
    stopped = Counter()
    for score in scores:
        right, blocks, loss = 0, 0, 0.0
        for pixels, labels in BATCHES:
            for image, label in zip(pixels, labels, strict=True):
                for count in range(1, len(score.order) + 1):
                    steps = score.order.steps[:count]
                    text = ",".join(f"{block}@{version}" for block, version in steps)
                    with torch.inference_mode(), running(model, text):
                        chances = model(image[None])[0].softmax(-1)
                    if chances.max() >= stop:
                        break
                blocks += count
                stopped[count] += 1
                right += int(chances.argmax() == label)
                loss -= math.log(chances[label])
        assert (score.blocks, score.top1) == (blocks / 10, 100 * right / 10)
        assert score.cross_entropy == pytest.approx(loss / 10, rel=1e-5)
    assert len(stopped) == (1 if stop == 1 else 4)  # it stops at every number of blocks
    assert scores[0] == dataclasses.replace(scores[3], index=0)


def test_an_image_stops_where_its_probability_is_the_threshold():
    """Not only above it."""
    model = VIT.wrapped().eval()
    pixels, labels = BATCHES[-1]
    with torch.no_grad(), running(model, "3"):
        chance = float(model(pixels)[0].softmax(-1).max())
    just_above = math.nextafter(chance, 1.0) + 1e-6
    blocks = []
    for stop in (chance, just_above):
        (score,) = evaluate(model, [(pixels, labels)], orders=["3,3"], stop=stop)
        blocks.append(score.blocks)
    assert blocks == [1, 2]


def test_without_a_stop_no_mean_number_of_blocks_is_told():
    (whole,) = evaluate(VIT.wrapped(), BATCHES, orders=["3,0,2,1"])
    (never,) = evaluate(VIT.wrapped(), BATCHES, orders=["3,0,2,1"], stop=1.0)
    assert (whole.blocks, never.blocks) == (None, 4.0)
    assert dataclasses.replace(never, blocks=None) == whole


@pytest.mark.parametrize("stop", [0, 98, math.nan])
def test_a_stop_that_is_no_probability_is_refused(stop):
    with refuses(UsageError):
        evaluate(VIT.wrapped(), BATCHES, modes="sequential", stop=stop)


def test_the_walk_of_an_order_is_short():
    """An order enters only these of our files from `evaluate` to the scores."""
    model, files = VIT.wrapped(), set()

    def note(frame, event, _):
        _, ours, file = frame.f_code.co_filename.partition("src/layershuffle/")
        if event == "call" and ours:
            files.add(file)

    gc.collect()  # what earlier tests left behind ends in files of ours, too
    before = sys.getprofile()
    with collector_paused():
        sys.setprofile(note)
        try:
            evaluate(model, BATCHES, orders=["3,0,2"])
        finally:
            sys.setprofile(before)
    names = (
        "evaluation",
        "orders",
        "tensors",
        "checks/calls",
        "checks/orders",
        "checks/trials",  # forgets earlier verdicts, and tries nothing
        "stack",
        "runs",
        "entries",
        "torch_private",
    )
    assert files == {f"core/{name}.py" for name in names}


@pytest.mark.parametrize(
    "what",
    [{"orders": ["4,0"]}, {"orders": [ls.ExecutionOrder.sequential(3)]}, {"modes": "kept:5"}],
    ids=["unknown", "other depth", "too many kept"],
)
def test_orders_that_do_not_fit_are_refused(what):
    with refuses(UsageError):
        evaluate(VIT.wrapped(), BATCHES, **what)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_become_no_rows(loss):
    (score,) = evaluate(VIT.wrapped(), BATCHES, modes="sequential")
    broken = dataclasses.replace(score, cross_entropy=loss)
    with refuses(DataError):
        score_rows(
            [score, broken], Split(dataset=range(10)), method="layershuffle", seed=0, draw="pass"
        )


def test_a_score_says_which_images_were_answered_right():
    """Against every image scored alone; batches are split."""
    model = VIT.wrapped()
    scores = evaluate(model, BATCHES, orders=["0,1,2,3", "3,1"], modes="arbitrary", num_orders=2)
    for score in scores:
        right = []
        for pixels, labels in BATCHES:
            with torch.inference_mode(), running(model, score.order):
                right += (model(pixels).argmax(dim=1) == labels).tolist()
        assert score.right.tolist() == right
        assert score.top1 == 100 * sum(right) / len(right)


def test_digit_pairs_are_scored_with_their_groups():
    """Rows of digit pairs name fewer images than were scored, each as many as its answers show."""
    settings = EvalSettings(modes="sequential,arbitrary", num_orders=2, max_images=40)
    evaluation = evaluate_spec("bundled:digits", "digit-pairs?test=60", settings=settings)
    split = evaluation.data.splits["test"]
    rows = score_rows(evaluation.scores, split, method="baseline", seed=0, draw="pass")
    assert len(rows) == 3
    for row, score in zip(rows, evaluation.scores, strict=True):
        count = float(independent_images(score.right.numpy(), split.groups.numpy()))
        assert (row.top1_n or score.images) == round(count, 1)
    assert 1 <= rows[0].top1_n < 40
    alone = score_rows(evaluation.scores, Split(dataset=range(40)), method="a", seed=0, draw="pass")
    assert {row.top1_n for row in alone} == {None}, "without groups all are independent"


# --- many orders in one go: exact counts, and bit-equal to one by one -----------------------------

BASE = tuple(range(12))
SWEEPS = {
    "truncations": ([BASE[:k] for k in range(1, 13)], 12),
    "all subsets": ([c for k in range(1, 13) for c in combinations(BASE, k)], 4095),
    "one missing": ([BASE, *combinations(BASE, 11)], 78),
    "two missing": ([*combinations(BASE, 10)], 285),
}


@pytest.mark.parametrize(("swept", "runs"), SWEEPS.values(), ids=list(SWEEPS))
def test_counts_of_sweeps(swept, runs):
    assert block_runs([ls.ExecutionOrder(order, 12) for order in swept]) == runs


def test_position_encoding_is_shared_too():
    model = ls.add_position(VIT.plain(), encoding=ls.EncodingForm()).eval()
    swept = [ls.ExecutionOrder(blocks, 4) for blocks in [(2, 0, 3, 1), (2, 0), (0, 1, 2, 3)]]
    batch = images(2)
    with torch.no_grad():
        for index, out in forward_many(model, batch, swept):
            with running(model, swept[index]):
                assert torch.equal(out, logits_of(model(batch)))


def test_orders_of_what_is_no_classifier_are_shared():
    """The caller says what a forward returns: here the state of every token."""
    model = VIT.wrapped()
    batch = images(2)
    with torch.no_grad():
        shared = ls.forward_many(
            model, batch, ["0,1,2,3", "0,1,3,2"], forward=model.forward_features
        )
        for index, tokens in shared:
            with running(model, ("0,1,2,3", "0,1,3,2")[index]):
                alone = model.forward_features(batch)
            assert tokens.dim() == 3
            assert torch.equal(tokens, alone)


@pytest.mark.parametrize(
    ("kept_bytes", "sizes"),
    [(1 << 20, [10]), (5, [5, 5]), (4.9, [4, 4, 2]), (0.1, [4, 4, 2])],
)
def test_images_at_once_are_those_whose_state_the_cache_holds(kept_bytes, sizes, monkeypatch):
    """`kept_bytes` in states of an image; in even parts, of no fewer than four."""
    model, batch = VIT.wrapped(), images(10)
    with ls.tap(model) as tapped, torch.inference_mode():
        model(batch[:1])
    of_one = tapped.records[0].tensor.nbytes
    monkeypatch.setattr("layershuffle.core.forwards._CACHED_BYTES", int(kept_bytes * of_one))
    with torch.inference_mode():
        size = images_at_once(model, batch, forward=lambda x: logits_of(model(x)))
    assert [*map(len, batch.split(size))] == sizes
    on_meta = batch.to("meta")  # stands for a GPU: nothing is run, all of it at once
    assert images_at_once(model, on_meta, forward=logits_of) == 10


@pytest.mark.parametrize(
    ("what", "forwards"),
    [
        ({"orders": ["3,0,2"]}, 1),
        ({"orders": ["3,0,2", "3,0,2"]}, 1),
        ({"modes": "sequential"}, 1),
        # Hooks see no forward of the trial.
        ({"orders": ["3,0,2", "3,0,1"]}, 2),
    ],
)
def test_one_order_is_one_forward(what, forwards):
    model, runs = VIT.wrapped(), []
    model.register_forward_hook(lambda *_: runs.append(1))
    evaluate(model, [BATCHES[0]], **what)
    assert len(runs) == forwards


def test_blocks_of_a_common_beginning_run_once():
    model = VIT.wrapped()
    swept = [ls.ExecutionOrder(b, 4) for b in [(0, 1, 2, 3), (0, 1, 3, 2), (0, 1), (3,), (0, 1)]]
    with torch.no_grad():
        runs = []
        for block in ls.blocks_of(model):
            block.register_forward_hook(lambda *_: runs.append(1))
        list(forward_many(model, images(1), swept))
    assert block_runs(swept) == 7
    assert len(runs) == 7  # the trial has left no trace


def test_no_more_states_are_kept_than_the_next_order_shares():
    model, alive = VIT.wrapped(), []
    states = weakref.WeakSet()
    for block in ls.blocks_of(model):
        block.register_forward_hook(lambda *call: states.add(call[-1]))
    swept = [ls.ExecutionOrder(b, 4) for b in [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3)]]
    with torch.no_grad():
        for _ in forward_many(model, images(1), swept):
            gc.collect()
            alive.append(len(states))
    # Two blocks are shared by the first two orders, none by the last; none stays for later.
    assert alive == [2, 0, 0]


def test_orders_that_a_backbone_cuts_are_refused():
    model = CUTTING["own-counting"].wrapped()
    with pytest.raises(StackError), torch.no_grad():
        list(forward_many(model, images(1), ["0,1,2,3,3", "0,1,2,3,2"]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stem_blocks_and_head_are_the_forward(family):
    model, batch = FAMILIES[family].wrapped(), images(2)

    def forward(pixels):
        return logits_of(model(pixels))

    if family == "hf-beit" and Version(transformers.__version__) < Version("5.9"):
        # Its blocks return tuples.
        with refuses(StackError):
            refuse_more_than_blocks(model, batch, forward=forward)
        return
    with torch.inference_mode():
        state, (args, kwargs) = run_stem(model, batch, forward=forward)
        for block in (2, 0, 3):
            state = state_of(ls.blocks_of(model)[block](state, *args, **kwargs))
        logits = run_head(model, batch, state=state, forward=forward)
        with running(model, (2, 0, 3)):
            assert torch.equal(logits, forward(batch))
    with refuses(StackError):
        run_stem(model, batch, forward=lambda pixels: pixels)


TWO_ENDS = {f"own-{name}" for name in ("own", "named", "byforward", "ofitsclass", "backwards")}
TWO_ENDS |= {f"own-{name}" for name in ("twoends", "tokensfirst", "postnormed", "shortening")}


@pytest.mark.parametrize("family", [*CHAINS.values(), *LOOPS.values()], ids=lambda f: f.name)
def test_only_a_backbone_that_hands_the_state_on_has_two_ends(family):
    model = family.wrapped()

    def forward(pixels):
        return logits_of(model(pixels))

    if family.name in TWO_ENDS:
        refuse_more_than_blocks(model, images(2), forward=forward)
    else:
        with pytest.raises(StackError):
            refuse_more_than_blocks(model, images(2), forward=forward)


def test_one_order_is_not_taken_for_a_list_of_them() -> None:
    with refuses(UsageError):
        ls.forward_many(VIT.wrapped(), images(2), "2,0,1")
