"""One graph for all blocks and orders, no recompiles, and eager mode only with a warning.

The backends are aot_eager and eager: graphs, guards and gradients as with inductor, no C compiler.
"""

import contextlib
import copy
import functools
import random
import sys

import pytest
import timm
import torch
import torch._dynamo
from runs import NO_DROPOUT, assert_same_weights, losses, settings, weights
from torch.nn import functional as F

import layershuffle as ls
from common import FAMILIES, images, logits_of
from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.stack import blocks_of, recomputing
from layershuffle.training import fit

# torch's own warnings while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Skipping serialization of"),  # of torch 2.6
]
DEPTH = 6
ROUNDS = ["1+0,4+2+3,5", "3,0@0,3,1@1,5@3"]
JOB = sys.modules["layershuffle.training.job"]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in the same process


def deep_model(**changes):
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", depth=DEPTH, **sizes, **changes)
    return ls.add_position(
        ls.wrap(model), encoding=ls.EncodingForm(dropout=0.1), prediction=ls.PredictionForm()
    )


def orders(count, *, seed=0):
    """Random permutations and subsets."""
    draw = random.Random(seed)
    return [draw.sample(range(DEPTH), draw.choice([DEPTH, DEPTH, 4])) for _ in range(count)]


def train(model, order, batch=4):
    pixels = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with ls.running(model, order), model.guessing() as guesses:
        logits = model(pixels)
        (F.cross_entropy(logits, torch.zeros(batch, dtype=torch.long)) + guesses.loss()).backward()


@pytest.mark.parametrize(("drop_path", "graphs"), [(0.0, 1), (0.1, DEPTH)])
def test_one_graph_for_all_blocks_and_orders(drop_path, graphs):
    """With position parts on, in training and in evaluation.

    A drop-path rate is a constant in the graph, so blocks of different rates have one graph each.
    """
    model = deep_model(drop_path_rate=drop_path)
    compiler = BlockCompiler(backend="aot_eager")
    compiler.add(model)
    with compiler.limits():
        train(model.train(), range(DEPTH))
        assert compiler.graphs == graphs
        with torch.compiler.set_stance("fail_on_recompile"):
            for order in (*orders(30), *ROUNDS):
                train(model, order)
        assert compiler.graphs == graphs
        pixels = torch.randn(4, 3, 16, 16)
        with torch.inference_mode():
            model.eval()(pixels)
            before = compiler.graphs
            with torch.compiler.set_stance("fail_on_recompile"):
                for order in (*orders(10, seed=1), *ROUNDS):
                    with ls.running(model, order):
                        model(pixels)
    assert compiler.graphs == before == 2 * graphs
    assert compiler.on


class Counting(BlockCompiler):
    """Records which graph runs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.ran = []

    def _compile(self, graph, inputs):
        compiled, number = super()._compile(graph, inputs), self.graphs

        def run(*arguments):
            self.ran.append(number)
            return compiled(*arguments)

        return run


def made_for(monkeypatch, kind):
    """The compilers of that kind that runs create."""
    compilers = []

    def make(**given):
        compilers.append(kind(backend="eager", **given))
        return compilers[-1]

    monkeypatch.setattr(JOB, "BlockCompiler", make)
    return compilers


def test_all_sizes_of_a_run_are_compiled_before_its_first_step(tmp_path, monkeypatch):
    """Epochs of four batches of 20 images and one of 16."""
    compilers, graphs = made_for(monkeypatch, Counting), []

    def listen(event):
        if event["kind"] in ("start", "log"):
            graphs.append(compilers[0].graphs)

    run = settings(compile=True, model=NO_DROPOUT, batch_size=20, steps=6, eval_every=6)
    result = fit(run, tmp_path, on_event=listen)
    assert graphs == [0, 2, 2, 2, 2, 2, 2]
    assert result.compile["recompiles"] == 0
    assert result.compile["graphs"] <= 4  # and evaluation, whose last batch may be smaller too


@pytest.mark.parametrize(
    "name", ["timm-eva02", "timm-xcit", "timm-mixer", "hf-vit", "hf-beit", "hf-dinov2",
             "hf-siglip", "torchvision-vit"],
)  # fmt: skip
def test_every_family_compiles_whole(name):
    family = FAMILIES[name]
    plain, model = family.wrapped(), family.wrapped()
    compiler = BlockCompiler(backend="eager")
    compiler.add(model)
    graphs = []
    for order in ((2, 0, 3, 1), (3, 1)):
        with ls.running(plain, order), ls.running(model, order), compiler.limits():
            assert torch.equal(logits_of(model(images())), logits_of(plain(images())))
        graphs.append(compiler.graphs)
    # torchvision hands its first block a tensor of another memory layout.
    assert graphs == ([2, 2] if name == "torchvision-vit" else [1, 1])
    assert compiler.on


def compiled_with(monkeypatch, backend):
    monkeypatch.setattr(JOB, "BlockCompiler", functools.partial(BlockCompiler, backend=backend))


def fitted(out, **changes):
    events = []
    result = fit(settings(**{"steps": 4, **changes}), out, on_event=events.append)
    return result, losses(events)


ARMS = {
    "recomputed groups": {
        "method": "layershuffle-predict",
        "max_parallel": 3,
        "orders_per_batch": 3,
        "accumulate": 2,
        "activation_checkpointing": True,
    },
    "position": {"method": "layershuffle-position", "encoding": {"dropout": 0.1}},
    "depth": {"method": "layershuffle", "min_kept": 1},
    "exit": {"method": "layershuffle", "exit_weight": 0.3},
}


@pytest.mark.parametrize("name", ARMS)
def test_a_compiled_run_is_the_eager_run(tmp_path, monkeypatch, name):
    compiled_with(monkeypatch, "aot_eager")
    compiled, compiled_losses = fitted(tmp_path / "one", compile=True, **ARMS[name])
    eager, expected = fitted(tmp_path / "two", compile=False, **ARMS[name])
    assert compiled.compile["mode"] == "compiled"
    assert compiled.compile["reason"] is None
    assert compiled.compile["recompiles"] == 0
    assert 2 <= compiled.compile["graphs"] <= 4  # training and evaluation, offsets of groups
    assert eager.compile == {
        "mode": "eager", "reason": "compile is off", "graphs": 0, "recompiles": 0,
    }  # fmt: skip
    assert compiled_losses == pytest.approx(expected, rel=1e-5)
    assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"), tolerance=1e-5)


def test_off_by_default_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result, _ = fitted(tmp_path, steps=1)
    assert result.compile["mode"] == "eager"
    assert "off by default on a CPU" in result.compile["reason"]


def test_no_c_compiler(tmp_path, caplog):
    import torch._inductor.config as inductor

    changes = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with inductor.patch(changes):
        result, _ = fitted(tmp_path, steps=2, compile=True)
    assert result.compile["mode"] == "eager"
    assert result.compile["reason"].startswith("InvalidCxxCompiler: No working C++ compiler found")
    assert caplog.text.count("NOT compiled") == 1


def test_more_graphs_than_allowed(tmp_path, monkeypatch, caplog):
    """torch would run the rest in eager mode with a warning in its own log."""
    compiled_with(monkeypatch, "eager")
    monkeypatch.setattr(sys.modules["layershuffle.core.compiling"], "_LIMIT", 2)
    result, _ = fitted(tmp_path, compile=True, model=NO_DROPOUT + "&drop_path_rate=0.3")
    assert result.compile["mode"] == "eager"
    assert result.compile["reason"].startswith("FailOnRecompileLimitHit")
    assert "NOT compiled" in caplog.text


class Breaking(Counting):
    """Compiles one graph after `broken` is set, and no more."""

    broken = False

    def _compile(self, graph, inputs):
        if self.broken == "quite":
            raise NotImplementedError("no such kernel")
        self.broken = "quite" if self.broken else False
        return super()._compile(graph, inputs)


@pytest.mark.parametrize("method", ["layershuffle", "layershuffle-predict"])
def test_a_graph_that_fails_in_the_middle(tmp_path, monkeypatch, caplog, method):
    """In the middle of the run and of a forward: in its second block, after a prediction."""
    # A graph per block, and yet no dropout that would show.
    model = NO_DROPOUT + "&drop_path_rate=1e-9"
    run = {"steps": 5, "eval_every": 5, "model": model, "method": method}

    def forget(event):
        events.append(event)
        if event["kind"] == "log" and event["step"] == 3:
            assert compilers[0].on
            compilers[0].broken = "soon"
            torch._dynamo.reset()

    with monkeypatch.context() as patch:
        compilers, events = made_for(patch, Breaking), []
        result = fit(settings(compile=True, **run), tmp_path / "one", on_event=forget)
    assert result.compile["reason"] == "NotImplementedError: no such kernel"
    assert result.compile["graphs"] == 5, "four blocks, and one again"
    assert caplog.text.count("NOT compiled") == 1
    _, expected = fitted(tmp_path / "two", compile=False, **run)
    assert losses(events) == pytest.approx(expected, rel=1e-5)


def test_recompiles_are_noticed_once(caplog):
    compiler = BlockCompiler(backend="eager")
    for shape, new, wanted in [(16, 1, 0), (16, 0, 0), (8, 1, 0), (16, 1, 1), (16, 2, 3)]:
        with compiler.step((shape, 3), {0, 1}):
            compiler.graphs += new
        assert compiler.recompiles == wanted
    with compiler.step((16, 3), {0, 1, 2}):  # a block that never ran before
        compiler.graphs += 1
    assert compiler.recompiles == 3
    assert caplog.text.count("compiled again") == 1


def test_a_compiled_model_is_saved_copied_and_unwrapped_as_usual(tmp_path):
    model = ls.load(NO_DROPOUT, seed=1)
    keys = list(model.state_dict())
    compiler = BlockCompiler(backend="eager")
    compiler.add(model)
    pixels = torch.randn(2, 1, 12, 20)
    with torch.inference_mode():
        expected = model(pixels)
        assert list(model.state_dict()) == keys
        ls.save(model, tmp_path / "saved")
        assert torch.equal(ls.load(f"dir:{tmp_path / 'saved'}")(pixels), expected)
        assert torch.equal(copy.deepcopy(model)(pixels), expected)
        compiler.give_up("a test")
        assert all(block._compiled_call_impl is None for block in blocks_of(model))
        assert list(ls.unwrap(model).state_dict()) == keys
        assert torch.equal(model(pixels), expected)


@pytest.mark.parametrize("name", ["torchvision-vit", "timm-vit"])
def test_recomputing_keeps_gradients_and_drops_activations(name):
    """For a family without a switch of its own, and for one where groups are recomputed."""
    for order in ((2, 0, 3, 1), [ls.ExecutionOrder((1, 0), 4)] * 2 + [ls.ExecutionOrder((3,), 4)]):
        kept, gradients = [], []
        for again in (False, True):
            model, sizes = FAMILIES[name].wrapped().train(), []
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, sizes=sizes: (sizes.append(tensor.numel()), tensor)[1], lambda t: t
            )
            how = recomputing(model) if again else contextlib.nullcontext()
            with ls.running(model, order), how, hooks:
                logits_of(model(images(3))).square().sum().backward()
            kept.append(sum(sizes))
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        assert kept[1] < 0.7 * kept[0]
        assert len(gradients[0]) == len(gradients[1])
        assert all(map(torch.equal, *gradients))
