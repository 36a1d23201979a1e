"""UMAP's numbers and the position probes, on features whose answers are known."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from subjects import subject_of
from torch.utils.data import TensorDataset

import layershuffle as ls
from common import DEPTH, FAMILIES, images
from layershuffle.analysis import position, umap
from layershuffle.analysis.features import pooled
from layershuffle.analysis.position_table import grid
from layershuffle.analysis.subject import Subject
from layershuffle.core.stack import running
from layershuffle.data import Split
from layershuffle.errors import UsageError
from refusals import refuses


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


@pytest.mark.parametrize(
    "settings",
    [{"block": 4}, {"neighbours": 4}],
)
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
