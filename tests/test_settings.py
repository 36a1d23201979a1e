"""Settings: layers, validation, and errors that name the key and the nearest valid one."""

import pytest
import yaml

from layershuffle.core.position_forms import EncodingForm
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.settings import digest, read_recipe
from layershuffle.scoring.settings import EvalSettings
from layershuffle.study.plan import make_plan
from layershuffle.study.settings import StudySettings
from layershuffle.training.settings import FitSettings
from refusals import refuses

BASE = {"method": "layershuffle", "model": "bundled:digits", "data": "digit-pairs"}
STUDY = {"name": "s", "model": "bundled:digits", "data": "digit-pairs"}


def test_defaults_are_the_papers():
    settings = FitSettings(**BASE)
    assert (settings.lr, settings.batch_size, settings.schedule) == (1e-4, 128, "linear")
    assert settings.clip == 1.0
    assert settings.weight_decay == 0.0
    assert not settings.paper_protocol
    assert settings.encoding == EncodingForm()


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"lr": -1}, "lr: Input should be greater than 0"),
        ({"lrr": 1e-3}, "'lrr' is not a setting, did you mean 'lr'"),
        ({"batchsize": 64}, "did you mean 'batch_size'"),
        ({"steps": 5, "epochs": 2}, "steps and epochs exclude each other"),
        ({"batch_size": 10, "accumulate": 3}, "accumulate=3 does not divide batch_size=10"),
        ({"method": "layershufle"}, "did you mean 'layershuffle'?"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"encoding": {"table": "none"}}, "table"),
        ({"holdout": 1.0}, "holdout"),
        ({"encoding": {"featurs": 3}}, "'encoding.featurs' is not a setting, did you mean 'featur"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"seed": 1 << 32}, "seed: Input should be less than 4294967296"),
        ({"epochs": float("inf")}, "epochs: Input should be a finite number"),
        ({"modle": "m"}, "did you mean 'model'?"),
    ],
)
def test_wrong_settings(fields, phrase):
    with pytest.raises(SettingsError) as caught:
        FitSettings(**{**BASE, **fields})
    assert phrase in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Next" not in str(caught.value), "of an error within it"


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "a: [",
        "a: !!python/object/apply:os.system ['true']",
        "1: 2",
        "a: 2024-13-45",
        "",
        pytest.param("[" * 5000, id="deep"),
    ],
)
def test_hostile_recipes(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with refuses(UsageError, path):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("steps: 5\nlr: 0.1\nsteps: 6\n", "'steps'"),
        ("\n\nencoding: {features: 4, table: shared, features: 5}\n", "'features'"),
    ],
    ids=["outside", "inside"],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, text, key):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with refuses(UsageError, path) as caught:
        read_recipe(path)
    assert f"{key} is there twice in" in str(caught.value)
    assert "line 3" in str(caught.value)


def test_a_key_may_replace_one_that_was_merged(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("one: &a {x: 1, y: 2}\nother: {<<: *a, y: 3}\n")
    assert read_recipe(path)["other"] == {"x": 1, "y": 3}


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbfsteps: 5\n")
    assert read_recipe(path) == {"steps": 5}


def test_a_recipe_that_is_absent(tmp_path):
    with refuses(UsageError, tmp_path / "none.yaml"):
        read_recipe(tmp_path / "none.yaml")


def test_shipped_recipes_are_valid():
    fits = ["digits-base.yaml", "digits-ordinary.yaml", "digits-swarm.yaml"]
    names = ("cifar100-paper", "digits-paper", "digits-quick", "imagenet-paper")
    names += ("fashion-dinov2", "fashion-dinov2-320", "fashion-ends", "digits-ends")
    studies = [f"{name}.yaml" for name in names]
    for name in fits:
        FitSettings(**read_recipe(asset("recipes", name)))
    for name in studies:
        StudySettings(**read_recipe(asset("recipes", name)))
    assert sorted(p.name for p in asset("recipes").glob("*.yaml")) == sorted(fits + studies)


def test_study_settings_reach_every_run():
    study = StudySettings(
        **STUDY,
        arms=[{"method": "layerdrop", "name": "half", "fit": {"block_drop": 0.5, "lr": 1e-3}}],
        fit={"steps": 7, "lr": 1e-2},
        seeds=[3],
    )
    settings = study.fit_settings(study.arms[0], 3)
    assert (settings.block_drop, settings.lr, settings.steps, settings.seed) == (0.5, 1e-3, 7, 3)
    assert study.arms[0].label == "half"


_ONE = {"arms": [{"method": "baseline"}]}


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"arms": [{"method": "baseline"}, {"method": "baseline"}]}, "baseline-seed0 twice"),
        ({"arms": [{"method": "baseline", "fit": {"lrr": 1}}]}, "did you mean 'lr'"),
        ({"arms": [{"metod": "baseline"}]}, "metod"),
        ({"arms": [], "evaluate": {"mode": "sequential"}}, "did you mean 'modes'"),
        ({"arms": []}, "arms: The list should have at least 1 item"),
        ({"arms": [{"method": "baseline"}], "seeds": [1, 1]}, "seeds: name every seed once"),
        ({"arms": [{"method": "baseline", "name": "../up"}]}, "name: String should match"),
        ({"arms": [{"method": "baseline"}], "evaluate": {"modes": "kept"}}, "not an evaluation"),
        ({"arms": [{"method": "baseline", "evaluate": {"modes": "kept"}}]}, "not an evaluation"),
        ({"arms": [{"method": "baseline", "seeds": [2, 2]}]}, "seeds: name every seed once"),
        ({"arms": [{"method": "truncated"}]}, "--kept 6"),
        ({**_ONE, "merging": [{"arms": ["layershuffle"]}]}, "The study has no arm 'layershuffle'"),
        ({**_ONE, "merging": [{"arms": ["baseline"], "options": {"merge": 3}}]}, "'merges'"),
        ({**_ONE, "merging": {"arms": ["baseline"]}}, "merging: Input should be a list"),
        ({**_ONE, "analyses": [{"name": "umap", "arm": "baseline", "seeds": [7]}]}, "no seed 7"),
        ({**_ONE, "analyses": [{"name": "umapp", "arm": "baseline"}]}, "did you mean 'umap'"),
    ],
)
def test_wrong_studies(fields, phrase):
    with pytest.raises((SettingsError, UsageError)) as caught:
        make_plan(StudySettings(**{**STUDY, **fields}))
    assert phrase in str(caught.value)


def test_digest_is_of_the_content():
    first, same = FitSettings(**BASE), FitSettings(**yaml.safe_load(yaml.safe_dump(BASE)))
    assert digest(first) == digest(same)
    assert digest(first) != digest(FitSettings(**BASE, seed=1))
    assert digest(EvalSettings()) != digest(first)
