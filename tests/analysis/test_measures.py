"""Every analysis against an explicit computation, over the families of host models."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from subjects import subject_of
from torch.utils.data import TensorDataset

import layershuffle as ls
from common import CLASSES, DEPTH, FAMILIES, HEADS, PERMUTED, SIZE, assert_close, images, logits_of
from layershuffle.analysis import attention, attribution, leave_one_out, norms, position, umap
from layershuffle.analysis.attention import AttentionWatch
from layershuffle.analysis.features import pooled
from layershuffle.analysis.norms import BranchWatch
from layershuffle.analysis.position_table import grid
from layershuffle.analysis.subject import DoesNotApply, Subject
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import blocks_of, running, with_hooks
from layershuffle.data import Split
from layershuffle.ground.errors import UsageError
from layershuffle.models.stem_head import run_stem
from refusals import refuses

ORDER = ExecutionOrder(PERMUTED, DEPTH)
NO_ATTENTION = {"timm-xcit", "timm-mixer"}
NOT_AFFINE = {"timm-xcit"}
GAMMAS = {  # the block's attribute that scales the output of a branch
    "timm-deit3": ("ls1.gamma", "ls2.gamma"),
    "timm-beit": ("gamma_1", "gamma_2"),
    "timm-eva02": ("gamma_1", "gamma_2"),
    "timm-dinov3": ("gamma_1", "gamma_2"),
    "timm-xcit": ("gamma1", "gamma3", "gamma2"),
    "hf-beit": ("lambda_1", "lambda_2"),
    "hf-dinov2": ("layer_scale1.lambda1", "layer_scale2.lambda1"),
    "hf-dinov2-registers": ("layer_scale1.lambda1", "layer_scale2.lambda1"),
}
WORKERS = ("attn", "attention", "self_attn", "self_attention", "local_mp", "mlp", "mlp_tokens")
WORKERS += ("mlp_channels",)


def value_at(block, path):
    for name in path.split("."):
        block = getattr(block, name)
    return 1.0 if block is None else block


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_branches_are_what_the_blocks_modules_give(name):
    """Branches are scaled module outputs; added to the stream they give the block's output."""
    model = FAMILIES[name].wrapped()
    outputs, taken = [], []

    def note(module, inputs, out):
        outputs.append(out[0] if isinstance(out, tuple) else out)

    class Check:
        def before(self, state, step):
            outputs.clear()
            taken.append(state)
            return state

        def after(self, state, step):
            block = blocks_of(model)[step.block]
            added = [branch.added for branch in watch.branches]
            assert_close(taken[-1] + sum(added), state, tolerance=2e-5)
            scales = [value_at(block, path) for path in GAMMAS.get(name, ())] or [1.0] * len(added)
            for branch, out, scale in zip(added, outputs, scales, strict=True):
                given = out.transpose(1, 2) if out.shape != branch.shape else out
                assert_close(branch, scale * given, tolerance=2e-5)

    for block in blocks_of(model):
        for child, module in block.named_children():
            if child in WORKERS:
                module.register_forward_hook(note)
    watch = BranchWatch(model)
    with torch.inference_mode(), watch, running(model, ORDER), with_hooks(model, Check()):
        model(images())
    assert len(taken) == DEPTH


def test_post_norm_blocks_are_refused():
    """With a norm after the attention, the branches cannot be separated."""
    import timm

    model = ls.wrap(
        timm.create_model(
            "vit_relpos_medium_patch16_224", img_size=SIZE, patch_size=8, embed_dim=32,
            depth=2, num_heads=2, num_classes=CLASSES,
            block_fn=timm.models.vision_transformer_relpos.ResPostRelPosBlock,
        ).eval()
    )  # fmt: skip
    with refuses(DoesNotApply):
        norms.measure(subject_of(model))


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NO_ATTENTION))
def test_attention_is_seen_in_every_block(name):
    model = FAMILIES[name].wrapped()
    watch = AttentionWatch()
    plain = logits_of(model(images()))
    with torch.inference_mode(), with_hooks(model, watch), watch:
        watched = logits_of(model(images()))
    assert_close(watched, plain.detach(), tolerance=1e-5)
    assert watch.grid == (4, 4)
    steps = [(step.position, step.block) for step, _ in watch.attentions]
    assert steps == [(k, k) for k in range(DEPTH)]
    for _, weights in watch.attentions:
        assert weights.shape[:2] == (3, HEADS)
        assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), tolerance=1e-5)


@pytest.mark.parametrize("name", sorted(NO_ATTENTION))
def test_models_without_attention_between_tokens(name):
    with refuses(DoesNotApply):
        attention.measure(subject_of(FAMILIES[name].wrapped()))


def test_attention_against_numpy_loops():
    """Weights, distance and entropy of a block of a timm ViT from its layers, entry by entry."""
    model = FAMILIES["timm-vit"].wrapped()
    batch = images(2)
    watch = AttentionWatch()
    with torch.inference_mode(), running(model, ORDER), with_hooks(model, watch), watch:
        model(batch)
    with torch.inference_mode(), running(model, ORDER), ls.tap(model) as tap:
        model(batch)
    block = blocks_of(model)[ORDER.blocks[2]]
    with torch.inference_mode():
        qkv = block.attn.qkv(block.norm1(tap.records[1].tensor))
    q, k, _ = qkv.reshape(2, 17, 3, HEADS, 16).permute(2, 0, 3, 1, 4).double().numpy()
    weights = watch.attentions[2][1]
    far = attention.distances(weights, (4, 4))
    even = attention.evenness(weights)
    for image, head, token in [(0, 0, 1), (1, 1, 16), (1, 0, 6)]:
        scores = [math.exp(q[image, head, token] @ k[image, head, t] / 4.0) for t in range(17)]
        share = [s / sum(scores) for s in scores]
        assert weights[image, head, token].tolist() == pytest.approx(share, rel=1e-4)
        entropy = -sum(s * math.log(s) for s in share)
        assert float(even[image, head, token]) == pytest.approx(entropy / math.log(17), rel=1e-4)
        row, column = divmod(token - 1, 4)
        apart = [math.hypot(t // 4 - row, t % 4 - column) for t in range(16)]
        expected = sum(s * d for s, d in zip(share[1:], apart, strict=True)) / sum(share[1:])
        assert float(far[image, head, token - 1]) == pytest.approx(expected, rel=1e-4)


# --- attribution ----------------------------------------------------------------------------------


def split_of(model, labels):
    subject = subject_of(model)
    with torch.no_grad():
        state, _ = run_stem(model, images(), forward=subject.logits)
    return attribution.split_logits(subject, images(), labels=labels, stem_state=state, order=ORDER)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_AFFINE))
def test_contributions_add_up_to_the_logit(name):
    model = FAMILIES[name].wrapped()
    labels = torch.tensor([0, 3, 4])
    split = split_of(model, labels)
    with torch.inference_mode(), running(model, ORDER):
        logits = logits_of(model(images()))
    expected = logits[range(3), labels] - logits.mean(1)
    total = split.stem + split.constant + sum(split.blocks)
    assert_close(total, expected, tolerance=1e-4 * max(1.0, float(split.stem.abs().max())))
    assert len(split.blocks) == DEPTH


def test_a_blocks_contribution_from_the_models_own_weights():
    """timm ViT: update of the class token, centred, over the norm's deviation, through the head."""
    model = FAMILIES["timm-vit"].wrapped()
    labels = torch.tensor([0, 3, 4])
    split = split_of(model, labels)
    with torch.no_grad(), running(model, ORDER), ls.tap(model) as tap:
        model(images())
        states = [record.tensor[:, 0].double() for record in tap.records]
        norm, head = model.norm, model.head
        deviation = (states[-1].var(1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        for position in (1, 3):
            update = states[position] - states[position - 1]
            update = (update - update.mean(1, keepdim=True)) / deviation * norm.weight
            logits = update @ head.weight.T.double()
            expected = logits[range(3), labels] - logits.mean(1)
            assert_close(split.blocks[position].double(), expected, tolerance=1e-5)


def test_class_attention_is_refused():
    with refuses(DoesNotApply):
        attribution.measure(subject_of(FAMILIES["timm-xcit"].wrapped()))


# --- leave one out --------------------------------------------------------------------------------


def test_leave_one_out_against_a_naive_loop():
    model = FAMILIES["hf-vit"].wrapped()
    subject = subject_of(model)
    measured = leave_one_out.measure(subject)
    loss = np.zeros((DEPTH, DEPTH))
    top1, counts = np.zeros((DEPTH, DEPTH)), np.zeros((DEPTH, DEPTH))

    def score(order, batch):
        with torch.inference_mode(), running(model, order):
            logits = logits_of(model(batch.images)).double()
        right = (logits.argmax(1) == batch.labels).sum()
        return float(F.cross_entropy(logits, batch.labels, reduction="sum")), 100 * int(right)

    for batch in subject.batches(share=0.25):
        for order in batch.orders:
            whole = score(order, batch)
            for at, block in enumerate(order):
                less = score([b for k, b in enumerate(order) if k != at], batch)
                loss[block, at] += less[0] - whole[0]
                top1[block, at] += less[1] - whole[1]
                counts[block, at] += len(batch.images)
    table = measured.tables["leave-one-out"]
    assert np.allclose(grid(table, "cross_entropy"), loss / counts, atol=1e-5)
    assert np.allclose(grid(table, "top1"), top1 / counts)
    facts = measured.facts
    # Of four orders, with common beginnings of one order alone: 4 + (3 + 2 + 1 + 0) each.
    assert facts["block_runs"] <= 4 * 10
    assert facts["mean_cross_entropy"] == pytest.approx(table.cross_entropy.mean())


# --- UMAP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm-vit", "hf-dinov2", "torchvision-vit", "hf-siglip"])
def test_grouped_images_equal_single_ones(name):
    model = FAMILIES[name].wrapped()
    features, positions = umap.collect(subject_of(model, count=6, seed=5))
    assert set(features) == ({"mean"} if name == "hf-siglip" else {"class", "mean"})
    for image in range(6):
        order = ls.Shuffled().draw(DEPTH, seed=5, step=image)
        with torch.inference_mode(), running(model, order), ls.tap(model) as tap:
            model(images(6)[image : image + 1])
        for record in tap.records:
            assert positions[image, record.block] == record.position
            for token, vectors in features.items():
                alone = pooled(record.tensor, token)[0].numpy()
                assert np.allclose(vectors[image, record.block], alone, atol=2e-5)


def clusters(gaps, *, each=30, noise=0.05):
    """Points about places on a line, `gaps` apart: one place per position."""
    places = np.concatenate([[0.0], np.cumsum(gaps)])
    positions = np.repeat(np.arange(len(places)), each)
    points = np.random.default_rng(0).normal(0, noise, (len(positions), 3))
    points[:, 0] += places[positions]
    return points, positions


def test_numbers_of_separate_clusters():
    numbers = umap.describe(*clusters([9.0, 3.0, 3.0, 3.0]), neighbours=5)
    assert numbers["purity"] == 1.0
    # Of 149 others: 29 at the same position, and 30 or 60 one away.
    assert numbers["chance"] == pytest.approx((2 * 59 + 3 * 89) / 5 / 149)
    assert numbers["early_gap"] == pytest.approx(3.0, rel=0.05)
    assert numbers["early_held"] == 1.0


@pytest.mark.parametrize("settings", [{"block": 4}, {"neighbours": 4}])
def test_umap_refuses(settings):
    with refuses(UsageError):
        umap.measure(subject_of(FAMILIES["timm-vit"].wrapped(), **settings))


# --- position -------------------------------------------------------------------------------------


@pytest.fixture(params=["mean", "class"])
def predicting(monkeypatch, request):
    """A model with a prediction part that is fitted on half of the images, and data to test it."""
    host = FAMILIES["timm-vit"].plain()
    model = ls.add_position(host, prediction=ls.PredictionForm(pooling=request.param)).eval()
    both = images(48)

    def split(self, name):
        part = both[:32] if name == "holdout" else both[32:]
        dataset = TensorDataset(part, torch.zeros(len(part), dtype=torch.long))
        return Split(dataset=dataset)

    monkeypatch.setattr(Subject, "_split", split)
    return subject_of(model, count=32, batch_size=16)


def test_a_probe_that_missed_a_position_is_refused(predicting):
    settings = predicting.settings.model_copy(update={"num_orders": 1})
    with refuses(UsageError):
        position.measure(replace(predicting, settings=settings))


def test_accuracies_against_loops(predicting):
    """The probe is fitted on the input of the prediction part's classifier of that block."""
    subject, block = predicting, 1
    given = []
    part = subject.model.prediction
    part.classifiers[block].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    measured = position.measure(subject)
    right, count = np.zeros(DEPTH), np.zeros(DEPTH)
    vectors = {"holdout": ([], []), "test": ([], [])}
    for split, share in (("holdout", 0.5), ("test", 1.0)):
        for batch in subject.batches(split=split, share=share):
            for order in batch.orders:
                with (
                    torch.inference_mode(),
                    running(subject.model.backbone, order),
                    ls.tap(subject.model.backbone) as tap,
                ):
                    subject.model(batch.images)
                at = order.blocks.index(block)
                state = tap.records[at].tensor
                with torch.inference_mode():
                    guess = part(state, block).argmax(-1)
                vectors[split][0].append(given[-1].numpy())
                vectors[split][1].extend([at] * len(state))
                if split == "test":
                    right[at] += int((guess == at).sum())
                    count[at] += len(guess)
    table = measured.tables["position"]
    heads = grid(table[table.source == "the model's own prediction part"], "accuracy")
    assert np.allclose(heads[block], 100 * right / count)
    probe = make_pipeline(
        StandardScaler(), LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    ).fit(np.concatenate(vectors["holdout"][0]), vectors["holdout"][1])
    truth = np.array(vectors["test"][1])
    guesses = probe.predict(np.concatenate(vectors["test"][0]))
    outputs = grid(table[table.source == "probe on the block's output"], "accuracy")
    for at in range(DEPTH):
        assert outputs[block, at] == pytest.approx(100 * (guesses == truth)[truth == at].mean())
