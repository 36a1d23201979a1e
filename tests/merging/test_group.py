"""A merge is a view: it equals a rebuilt model and needs almost no memory. Plans are pure draws."""

import copy
import gc
import math
import re
import tracemalloc
from dataclasses import replace

import pytest
import timm
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import layershuffle as ls
from common import FAMILIES, ORDERS, images, logits_of, redraw
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import running
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.merging.group import MergeGroup, averaged, end_tensors, merge
from layershuffle.merging.plans import MergePlan, orders_seed, sample_plans
from layershuffle.models.files import weights_digest
from layershuffle.models.origin import Origin, remember
from own_models import Own
from refusals import refuses

PLANS = {
    "average": MergePlan((2, 0, 3, 1)),
    "one donor": MergePlan((3, 1, 0, 2), stem=3, head=3),
    "two donors": MergePlan((1, 1, 0, 2), stem=2, head=0),
    "mixed": MergePlan((0, 1, 2, 3), stem="average", head=1),
    "random slots": MergePlan((2, 0, 3, 1), slots=(1, 3, 0, 2)),
}


def donors_of(name, *, count=4, parts=None):
    """Models of one family with other weights; `parts` adds position parts."""
    models = []
    for seed in range(count):
        model = FAMILIES[name].wrapped()
        if parts is not None:
            model = ls.add_position(model, **parts, seed=seed)
        models.append(redraw(model, seed=10 + seed).eval())
    return models


def rebuilt(donors, plan):
    """The slow path: a copy of the first donor, with every tensor replaced by hand."""
    model = copy.deepcopy(donors[0])
    states = [donor.state_dict() for donor in donors]
    backbone = backbone_of(model)
    # The name of the attribute that holds the backbone of a model with position parts.
    prefix = next((f"{n}." for n, part in model.named_children() if part is backbone), "")
    keys = [prefix + key for key in backbone.state_dict()]
    place = {module: path for path, module in backbone.named_modules()}
    stack = next(m for m in backbone.modules() if type(m).__name__ == "BlockStack")
    inside = [f"{prefix}{place[stack]}.{name}." for name in stack._modules]
    first = min(i for i, key in enumerate(keys) if key.startswith(tuple(inside)))
    state = {}
    for i, key in enumerate(keys):
        block = next((b for b, start in enumerate(inside) if key.startswith(start)), None)
        if block is None:
            state[key] = pick(states, key, plan.stem if i < first else plan.head)
        else:
            taken = inside[plan.blocks[block]] + key.removeprefix(inside[block])
            state[key] = states[plan.donors[block]][taken]
    for key in states[0].keys() - set(keys):
        if key == "encoding.table" and states[0][key].dim() == 3:
            places = zip(plan.donors, plan.blocks, strict=True)
            state[key] = torch.stack([states[d][key][b] for d, b in places])
        elif key == "encoding.table":
            state[key] = pick(states, key, plan.stem)
        else:
            part, name, number, *rest = key.split(".")
            taken = ".".join([part, name, str(plan.blocks[int(number)]), *rest])
            state[key] = states[plan.donors[int(number)]][taken]
    model.load_state_dict(state)
    return model


def pick(states, key, source):
    if isinstance(source, int):
        return states[source][key]
    tensors = [state[key] for state in states]
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack([t.double() for t in tensors]).mean(0).to(tensors[0].dtype)


def answers(model, order=None):
    with torch.inference_mode():
        if order is None:
            return logits_of(model(images()))
        with running(model, order):
            return logits_of(model(images()))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_view_computes_what_a_rebuilt_model_computes(name):
    donors = donors_of(name)
    before = [weights_digest(donor) for donor in donors]
    group = MergeGroup(donors)
    views = {label: group.merge(plan) for label, plan in PLANS.items()}
    for label, plan in PLANS.items():
        slow = rebuilt(donors, plan)
        got = views[label].state_dict()
        assert list(got) == list(slow.state_dict())
        different = [k for k, t in slow.state_dict().items() if not torch.equal(got[k], t)]
        assert not different, different
        for order in (None, *ORDERS.values()):
            assert torch.equal(answers(views[label], order), answers(slow, order)), (label, order)
    assert [weights_digest(donor) for donor in donors] == before
    alone = FAMILIES[name].wrapped()
    assert torch.equal(answers(redraw(alone, seed=10).eval()), answers(donors[0]))


@pytest.mark.parametrize("table", ["shared", "per-block"])
def test_position_parts_go_with_the_blocks_and_a_shared_table_with_the_stem(table):
    parts = {"encoding": ls.EncodingForm(table=table), "prediction": ls.PredictionForm()}
    donors = donors_of("timm-vit", parts=parts)
    for plan in PLANS.values():
        view, slow = merge(donors, plan), rebuilt(donors, plan)
        state = view.state_dict()
        assert all(torch.equal(state[k], t) for k, t in slow.state_dict().items())
        for model in (view, slow):
            with running(model, (2, 0, 3, 1)), model.guessing() as guesses:
                model.out = answers(model, (2, 0, 3, 1))
            model.loss = guesses.items and guesses.loss()
        assert torch.equal(view.out, slow.out)
        assert torch.equal(view.loss, slow.loss)


LIBRARIES = ["timm-vit", "hf-vit", "hf-timm-wrapper"]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("positioned", [False, True])
def test_saved_and_loaded_it_is_a_model_of_its_own(name, positioned, tmp_path):
    donors = donors_of(name, parts={"encoding": ls.EncodingForm()} if positioned else None)
    before = [weights_digest(donor) for donor in donors]
    view = merge(donors, PLANS["average"])
    wanted = answers(view, "2,0,3,1")
    ls.save(view, tmp_path / "merge")
    loaded = ls.load(f"dir:{tmp_path / 'merge'}")
    assert torch.equal(answers(loaded, "2,0,3,1"), wanted)
    assert torch.equal(answers(rebuilt(donors, PLANS["average"]), "2,0,3,1"), wanted)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert [weights_digest(donor) for donor in donors] == before


def test_a_hundred_merges_of_twelve_models_add_less_than_five_percent():
    """Tensors by their storages, Python objects by tracemalloc: width 192, depth 12."""
    first = ls.wrap(timm.create_model("vit_tiny_patch16_224", img_size=32)).eval()
    donors = [first, *(copy.deepcopy(first) for _ in range(11))]
    storages = storages_of(donors)
    group = MergeGroup(donors)
    group.merge(sample_plans(12, 12, count=1, seed=1)[0])  # what is imported or cached once
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    views = [group.merge(plan) for plan in sample_plans(12, 12, count=100, seed=0)]
    objects = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    total = sum(storages.values())
    tensors = sum(storages_of([*donors, *views]).values()) - total
    assert total > 200e6, total
    assert tensors > 0
    assert (tensors + objects) / total < 0.05, (tensors, objects, total)
    assert objects / 100 < 50_000, objects  # bytes per merge


def storages_of(models):
    """Bytes by storage."""
    tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_base_ends():
    donors, base = donors_of("timm-vit"), redraw(FAMILIES["timm-vit"].wrapped(), seed=99).eval()
    plan = MergePlan((2, 0, 3, 1), stem="base", head="average")
    with refuses(UsageError):
        merge(donors, plan)
    view = MergeGroup(donors, base=base).merge(plan)
    stem, head = end_tensors(view)
    assert all(tensor is end_tensors(base)[0][name] for name, tensor in stem.items())
    assert torch.equal(head["head.weight"], averaged([d.head.weight for d in donors]))
    other = copy.deepcopy(base)
    other.head = nn.Linear(32, 7)
    with refuses(UsageError):
        MergeGroup(donors, base=other).merge(replace(plan, head="base"))
    encoded = [
        ls.add_position(d, encoding=ls.EncodingForm(table="shared")).eval()
        for d in donors_of("timm-vit")
    ]
    with refuses(UsageError):
        MergeGroup(encoded, base=base).merge(plan)


def with_record(model, **record):
    return remember(model, Origin(record=record))


def changed(name, **changes):
    """A pico ViT of timm with another shape or setting."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    sizes |= {"num_classes": 5, **changes}
    return ls.wrap(timm.create_model(name, **sizes)).eval()


VIT = "vit_tiny_patch16_224"


def with_other_constants():
    model = changed(VIT)
    model.register_buffer("frequencies", torch.arange(3.0), persistent=False)
    return model


MISFITS = {
    "width": lambda: changed(VIT, embed_dim=64),
    "depth": lambda: changed(VIT, depth=5),
    "classes": lambda: changed(VIT, num_classes=6),
    "view": lambda: changed(VIT, img_size=64),
    "kind": FAMILIES["hf-vit"].wrapped,
    "library": FAMILIES["torchvision-vit"].wrapped,
    "kind of timm": FAMILIES["timm-beit"].wrapped,
    "shape": lambda: changed(VIT, mlp_ratio=2.0),
    "heads": lambda: changed(VIT, num_heads=4),
    "activation": lambda: changed(VIT, act_layer="relu"),
    "constants": with_other_constants,
    "dtype": lambda: changed(VIT).bfloat16(),
    "position": lambda: ls.add_position(changed(VIT), encoding=ls.EncodingForm()).eval(),
    "base": lambda: with_record(changed(VIT), method="m", provenance={"base": "b", "data": "d"}),
    "base weights": lambda: with_record(
        changed(VIT), method="m", provenance={"base": "a", "base_sha256": "1", "data": "d"}
    ),
    "method": lambda: with_record(changed(VIT), method="n", provenance={"base": "a", "data": "d"}),
    "data": lambda: with_record(changed(VIT), method="m", provenance={"base": "a"}),
}


@pytest.mark.parametrize("name", MISFITS)
def test_donors_that_do_not_fit_are_refused_with_the_reason(name):
    pair = [changed(VIT), MISFITS[name]()]
    if name in ("base", "base weights", "method", "data"):
        with_record(pair[0], method="m", provenance={"base": "a", "data": "d"})
    with refuses(UsageError):
        MergeGroup(pair)
    if name in ("method", "data"):
        MergeGroup(pair, mixed=True)
    else:
        with refuses(UsageError):
            ls.uniform_soup(pair)


def test_the_record_says_what_is_shared_and_who_gives_what(tmp_path):
    shared = {"base": "bundled:digits", "data": "digit-pairs"}
    donors = [
        with_record(changed(VIT), method="layershuffle", provenance={**shared, "torch": "2"})
        for _ in range(2)
    ]
    view = MergeGroup(donors, names=["runs/a", "runs/b"]).merge(MergePlan((0, 1, 1, 0), head=1))
    ls.save(view, tmp_path / "merge")
    (loaded,) = [ls.models.read_record(tmp_path / "merge")]
    assert loaded["method"] == "layershuffle"
    assert loaded["provenance"] == {
        **shared,
        "merge": {
            "stem": "average",
            "head": "runs/b",
            "blocks": [0, 1, 1, 0],
            "donors": [{"model": "runs/a"}, {"model": "runs/b"}],
        },
    }
    assert "selected" not in loaded
    (record,) = re.findall(
        "```yaml\n(.*?)```", (tmp_path / "merge" / "README.md").read_text(), re.S
    )
    assert yaml.safe_load(record) == {"provenance": loaded["provenance"]}


@pytest.mark.parametrize(
    "combine",
    [
        MergeGroup,
        ls.uniform_soup,
        lambda donors: ls.greedy_soup(donors, lambda _: 1.0),
        lambda donors: ls.evaluate_ensemble(donors, [(images(3), torch.tensor([0, 1, 2]))]),
    ],
    ids=["merge", "uniform soup", "greedy soup", "ensemble"],
)
def test_a_donor_that_is_not_finite_is_refused(combine):
    donors = donors_of("timm-vit", count=2)
    with torch.no_grad():
        donors[1].blocks[2].norm1.weight[3] = float("nan")
    with refuses(ModelFileError, "1"):
        combine(donors)


def test_models_of_the_user_are_merged():
    """Of no library, and without an attribute that names their width."""
    donors = [redraw(Own(), seed=seed).eval() for seed in range(2)]
    for donor in donors:
        del donor.hidden_size
        ls.wrap(donor)
    plan = MergePlan((0, 1, 0, 1), stem="average", head=1)
    assert torch.equal(answers(ls.merge(donors, plan)), answers(rebuilt(donors, plan)))


# --- plans ----------------------------------------------------------------------------------------

sizes = st.tuples(st.integers(2, 6), st.integers(0, 3)).map(lambda t: (t[0] + t[1], t[0]))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 1 << 31), st.data())
def test_no_two_blocks_of_one_donor_and_no_two_merges_alike(size, seed, data):
    num, depth = size
    count = data.draw(st.integers(1, min(24, math.perm(num, depth))))
    plans = sample_plans(num, depth, count=count, seed=seed)
    assert len({plan.donors for plan in plans}) == len(plans) == count
    for plan in plans:
        assert len(set(plan.donors)) == len(plan.donors) == depth
        assert set(plan.donors) <= set(range(num))
    assert plans == sample_plans(num, depth, count=count, seed=seed)
    assert plans[: count // 2 or 1] == sample_plans(num, depth, count=count // 2 or 1, seed=seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 1 << 31))
def test_all_merges_with_replacement_are_found(num, depth, seed):
    plans = sample_plans(num, depth, count=num**depth - num, seed=seed, replacement=True)
    assert len({plan.donors for plan in plans}) == num**depth - num
    assert all(len(set(plan.donors)) > 1 for plan in plans)  # all from one donor is no merge


def test_random_slots_are_permutations_for_the_same_donors() -> None:
    own = sample_plans(15, 12, count=50, seed=5)
    random = sample_plans(15, 12, count=50, seed=5, slots="random")
    assert [plan.donors for plan in own] == [plan.donors for plan in random]
    assert all(plan.slots is None and plan.blocks == tuple(range(12)) for plan in own)
    assert all(sorted(plan.blocks) == list(range(12)) for plan in random)
    assert len({plan.blocks for plan in random}) == 50
    assert str(MergePlan((2, 0), slots=(1, 0))) == "2:1,0:0"
    with refuses(UsageError):
        MergePlan((0, 1), slots=(0, 0)).check(2, 2)
    with refuses(UsageError):
        MergePlan(("average", 1)).check(2, 2)  # type: ignore[arg-type]


def test_the_draws_are_uniform():
    """Chi-square over the 24 permutations of 4 donors, one plan for each of 2,400 seeds."""
    counts = {}
    for seed in range(2400):
        (plan,) = sample_plans(4, 4, count=1, seed=seed)
        counts[plan.donors] = counts.get(plan.donors, 0) + 1
    chi2 = sum((n - 100) ** 2 / 100 for n in counts.values())
    assert len(counts) == 24
    assert chi2 < 49.7, chi2  # 0.999 quantile at 23 degrees of freedom


@pytest.mark.parametrize("end", ["first", "last", "donor", "average", "base"])
def test_ends(end):
    plans = sample_plans(15, 12, count=20, seed=5, end=end)
    assert [p.donors for p in plans] == [p.donors for p in sample_plans(15, 12, count=20, seed=5)]
    for plan in plans:
        assert plan.stem == plan.head
        if end in ("first", "last"):
            assert plan.stem == plan.donors[0 if end == "first" else -1]
        elif end == "donor":
            assert plan.stem in plan.donors
        else:
            assert plan.stem == end
    if end == "donor":
        assert len({plan.stem for plan in plans}) > 5


def test_merges_are_not_drawn_as_orders_are():
    plans = sample_plans(12, 12, count=20, seed=0)
    orders = [ls.Shuffled().draw(12, seed=0, step=step).blocks for step in range(20)]
    assert not {plan.donors for plan in plans} & set(orders)
    seeds = {orders_seed(0, group, index=i) for group in range(5) for i in range(50)}
    assert len(seeds) == 250


@pytest.mark.parametrize(
    ("num", "depth", "count", "replacement"),
    [(5, 12, 1, False), (4, 4, 25, False), (2, 3, 7, True), (4, 4, 0, False)],
)
def test_impossible_counts_are_refused(num, depth, count, replacement):
    with refuses(UsageError):
        sample_plans(num, depth, count=count, seed=0, replacement=replacement)


@pytest.mark.parametrize(
    "plan",
    [
        MergePlan((0, 1, 0)),
        MergePlan((0, 1, 2, 0)),
        MergePlan((0, 1, 1, -1)),
        MergePlan((0, 1, 1, 0), stem=5),
        MergePlan((0, 1, 1, 0), head="mean"),
    ],
)
def test_plans_that_do_not_fit(plan):
    with refuses(UsageError):
        plan.check(2, 4)
