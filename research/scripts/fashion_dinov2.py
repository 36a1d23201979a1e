# Ran at commit 8550626, on one GPU, from another directory: see docs/results/fashion-dinov2.
"""Runs the study on one GPU: many processes, each takes the next job that is ready."""
from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path

CODE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("WORK", "runs/fashion-dinov2"))
OUT = Path(os.environ.get("OUT", "out"))
STEPS = int(os.environ.get("STEPS", "2000"))
RATE_STEPS = int(os.environ.get("RATE_STEPS", "500"))
ORDERS = int(os.environ.get("ORDERS", "20"))
BATCH = int(os.environ.get("BATCH", "64"))
SMALL = os.environ.get("SMALL") == "1"  # a trial on a CPU
os.environ.setdefault("PIXELS", str(WORK / "pixels.pt"))
MAIN = ("anyorder", "baseline", "layershuffle")
RATES = {
    "baseline": (2e-5, 5e-5, 1e-4, 2e-4), "layerdrop": (5e-5, 1e-4, 2e-4), "truncated-6": (5e-5, 1e-4, 2e-4),
    "layershuffle": (5e-5, 1e-4, 2e-4, 4e-4), "layershuffle-position": (1e-4, 2e-4, 4e-4),
    "layershuffle-predict": (1e-4, 2e-4, 4e-4), "anyorder": (5e-5, 1e-4, 2e-4, 4e-4),
    "anyorder-3-distinct": (5e-5, 1e-4, 2e-4, 4e-4),
}
if "RATES" in os.environ:
    RATES |= {k: tuple(v) for k, v in json.loads(os.environ["RATES"]).items()}
RATE_OF = {"truncated-3": "truncated-6", "truncated-9": "truncated-6"}
# Contiguous groups of similar blocks of the base, each with the block most like the others of it.
GROUPS = (1, 1, 6, 6, 6, 6, 6, 6, 6, 6, 11, 11)


def study():
    import yaml

    from layershuffle.study.settings import StudySettings

    fields = yaml.safe_load((CODE / "recipe.yaml").read_text())
    fields["fit"] |= {"steps": STEPS, "batch_size": BATCH, "eval_every": max(1, STEPS // 4)}
    fields["evaluate"]["num_orders"] = ORDERS
    if SMALL:
        fields["evaluate"]["precision"] = "fp32"
        fields["merging"]["options"] |= {"precision": "fp32", "merges": 2, "num_orders": 1}
        fields["fit"]["warmup"] = 1
        for a in fields["analyses"]:
            a["options"] = {"images": 40, "orders": 12, "neighbours": 5}
    else:
        for a in fields["analyses"]:
            a["options"] = {"images": 500}
    return StudySettings(**fields)


# --- jobs -----------------------------------------------------------------------------------------

def jobs():
    """(name, kind, arguments, needs), the most valuable first."""
    found = []

    def add(name, kind, needs=(), **arguments):
        found.append({"name": name, "kind": kind, "needs": list(needs), **arguments})

    arms = ["anyorder", "anyorder-3-distinct", "baseline", "layershuffle", "layershuffle-position",
            "layershuffle-predict", "layerdrop", "truncated-9", "truncated-6", "truncated-3"]
    order = ("anyorder", "anyorder-3-distinct", "layershuffle", "layershuffle-position", "layershuffle-predict",
             "baseline", "layerdrop", "truncated-6")
    for arm in order:
        for lr in RATES[arm]:
            add(f"rate-{arm}-{lr:g}", "rate", arm=arm, lr=lr)

    def rates(arm):
        arm = RATE_OF.get(arm, arm)
        return [f"rate-{arm}-{lr:g}" for lr in RATES[arm]]

    for seed in range(3):
        for arm in arms:
            add(f"{arm}-seed{seed}", "run", rates(arm), arm=arm, seed=seed)
        if seed == 0:
            add("probed", "probed")
    for seed in (3, 4):
        for arm in MAIN:
            add(f"{arm}-seed{seed}", "run", rates(arm), arm=arm, seed=seed)
    add("sure-0", "sure", [f"{arm}-seed0" for arm in MAIN], seed=0)
    any_rates = rates("anyorder")
    add("exit1-seed0", "variant", any_rates, arm="anyorder", label="anyorder-exit-1", seed=0, fit={"exit_weight": 1.0})
    add("self-seed0", "variant", any_rates, arm="anyorder", label="anyorder-own-answer", seed=0, extra={"kind": "self"})
    taught = {"kind": "teacher", "teacher": "baseline-seed0"}
    add("taught-seed0", "variant", [*any_rates, "baseline-seed0"], arm="anyorder", label="anyorder-taught", seed=0, extra=taught)
    tied = rates("anyorder-3-distinct")
    add("tied-taught-seed0", "variant", [*tied, "baseline-seed0"], arm="anyorder-3-distinct",
        label="anyorder-3-distinct-taught", seed=0, extra={**taught, "groups": GROUPS})
    add("tied-groups-seed0", "variant", tied, arm="anyorder-3-distinct", label="anyorder-3-distinct-groups", seed=0, extra={"groups": GROUPS})
    for arm in MAIN:
        add(f"held-{arm}-0", "held", rates(arm), arm=arm, seed=0)
    for arm in ("layershuffle", "baseline", "anyorder"):
        add(f"merging-{arm}", "merging", [f"{arm}-seed{s}" for s in range(5)], arm=arm)
    for seed in range(3):
        add(f"position-{seed}", "analysis", [f"layershuffle-predict-seed{seed}"], task=f"position-layershuffle-predict-seed{seed}")
    for seed in (1, 2):
        for label, fit, extra in (("anyorder-exit-1", {"exit_weight": 1.0}, {}), ("anyorder-own-answer", {}, {"kind": "self"}),
                                  ("anyorder-taught", {}, taught)):
            add(f"{label}-seed{seed}", "variant", [*any_rates, "baseline-seed0"], arm="anyorder", label=label, seed=seed, fit=fit, extra=extra)
        for label, extra in (("anyorder-3-distinct-taught", {**taught, "groups": GROUPS}), ("anyorder-3-distinct-groups", {"groups": GROUPS})):
            add(f"{label}-seed{seed}", "variant", [*tied, "baseline-seed0"], arm="anyorder-3-distinct", label=label, seed=seed, extra=extra)
    for seed in (1, 2):
        add(f"sure-{seed}", "sure", [f"{arm}-seed{seed}" for arm in MAIN], seed=seed)
        for arm in MAIN:
            add(f"held-{arm}-{seed}", "held", rates(arm), arm=arm, seed=seed)
    for name in ("umap", "norms", "cka", "attention"):
        add(f"{name}-layershuffle", "analysis", ["layershuffle-seed0"], task=f"{name}-layershuffle-seed0")
    for number in range(int(os.environ.get("SPEED", "0"))):
        add(f"speed-{number}", "speed", arm="anyorder" if number % 2 else "layershuffle")
    if "ONLY" in os.environ:
        keep = set(os.environ["ONLY"].split(","))
        first = {"run0": "run", "variant0": "variant", "held0": "held"}
        found = [j for j in found if j["name"] in keep or j["kind"] in keep
                 or any(k in keep and j["kind"] == kind and j["seed"] == 0 for k, kind in first.items())]
        names = {j["name"] for j in found}
        for j in found:
            j["needs"] = [n for n in j["needs"] if n in names]
    return found


# --- one process ----------------------------------------------------------------------------------

EXTRA: dict = {}


def install() -> None:
    """Prepared pixels in place of files, TF32 products, no curves for tensorboard, arms of this study."""
    import torch
    import torch.nn.functional as F

    import layershuffle.analysis.subject
    import layershuffle.evaluation
    import layershuffle.merging.scoring
    import layershuffle.study.worker as worker
    import layershuffle.training.fit
    import layershuffle.training.job as job_module
    from layershuffle.data import loading
    from layershuffle.training.state import TrainState

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    loading.SOURCES["hf"] = dataclasses.replace(loading.SOURCES["hf"], module="fashion_dinov2_data", extra=None)
    for module in (layershuffle.analysis.subject, layershuffle.evaluation, layershuffle.merging.scoring, job_module):
        module.loader_processes = lambda spec="": 0
    layershuffle.training.fit.missing = lambda *names: ["tensorboard"]
    worker._progress_writer = history
    plain, middle = TrainState.loss_and_logits, job_module.middle_blocks
    job_module.middle_blocks = lambda distinct, depth: EXTRA["groups"] if "groups" in EXTRA else middle(distinct, depth)

    def loss_and_logits(self, model, *, images, labels):
        if "kind" not in EXTRA:
            return plain(self, model, images=images, labels=labels)
        logits, _ = self._forward(model, images)
        final, early = logits.chunk(2)
        weight = self.job.method.exit_weight
        if EXTRA["kind"] == "self":
            loss = F.cross_entropy(final, labels) + weight * F.cross_entropy(early, labels)
            own = final.detach().log_softmax(-1)
            return loss + weight * F.kl_div(early.log_softmax(-1), own, reduction="batchmean", log_target=True), final
        with torch.no_grad():
            soft = teacher(EXTRA["teacher"])(images).logits.float().softmax(-1)
        target = (soft + F.one_hot(labels, soft.shape[-1])) / 2
        return F.cross_entropy(final, target) + weight * F.cross_entropy(early, target), final

    TrainState.loss_and_logits = loss_and_logits


_TEACHERS: dict = {}


def teacher(name):
    if name not in _TEACHERS:
        from layershuffle.models import host_of, load

        _TEACHERS[name] = host_of(load(f"dir:{WORK / 'runs' / name / 'fit'}")).eval().to(device())
    return _TEACHERS[name]


def device():
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def history(directory: Path):
    """A listener that writes the curves of a run."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / "history.csv").open("w")
    columns = ("step", "loss", "grad_norm", "learning_rate", "accuracy", "eval_sequential_cross_entropy",
               "eval_sequential_top1", "eval_arbitrary_cross_entropy", "eval_arbitrary_top1")
    writer = csv.DictWriter(file, columns, extrasaction="ignore")
    writer.writeheader()

    def listen(event):
        if event["kind"] in ("log", "scores"):
            writer.writerow({k: (f"{v:.6g}" if isinstance(v, float) else v) for k, v in event.items()})
            file.flush()

    return listen


def append(name: str, row: dict) -> None:
    """A line of JSON, whole whichever process writes it."""
    with (WORK / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def best_rate(arm: str) -> float:
    arm = RATE_OF.get(arm, arm)
    rows = [json.loads(x) for x in (WORK / "rates.jsonl").read_text().splitlines()] if (WORK / "rates.jsonl").exists() else []
    found = {r["lr"]: r["value"] for r in rows if r["arm"] == arm}
    return min(found, key=found.get) if found else RATES[arm][1]


def spec_of(arm: str, seed: int, *, label: str | None = None, **changes):
    """The run of an arm, with its rate."""
    from layershuffle.settings import FitSettings
    from layershuffle.study.plan import RunSpec, run_name

    plan = study()
    found = plan.arm(arm)
    fields = plan.fit_settings(found, seed).model_dump() | {"lr": best_rate(arm)} | changes
    name = label or arm
    evaluate = plan.evaluate_settings(found)
    if label:
        evaluate = evaluate.model_copy(update={"modes": "sequential,arbitrary,kept:9:arbitrary,kept:6:arbitrary,kept:3:arbitrary"})
    return RunSpec(name=run_name(name, seed), arm=name, part="main", settings=FitSettings(**fields), evaluate=evaluate)


def do(job) -> None:
    from layershuffle.study.worker import execute

    EXTRA.clear()
    EXTRA.update(job.get("extra", {}))
    if "groups" in EXTRA:
        EXTRA["groups"] = tuple(EXTRA["groups"])
    globals()["do_" + job["kind"]](job, execute)


def do_rate(job, execute):
    from layershuffle.training import fit

    # Best of the last state: half-way states of a short run say little of a rate.
    spec = spec_of(job["arm"], 1000, steps=RATE_STEPS, eval_every=RATE_STEPS, lr=job["lr"])
    place = WORK / "rates" / job["name"]
    begun = time.time()
    try:
        value = fit(spec.settings, place).selected["value"]
    except Exception as error:
        if "became" not in str(error):
            raise
        value = float("inf")
    append("rates.jsonl", {"arm": job["arm"], "lr": job["lr"], "value": value, "steps": RATE_STEPS, "seconds": round(time.time() - begun, 1)})
    shutil.rmtree(place, ignore_errors=True)


class Enough(Exception):
    """Ends a training that was only timed."""


def do_speed(job, execute):
    """Steps per second while all processes train."""
    from layershuffle.training import fit

    spec = spec_of(job["arm"], 1000, steps=100_000, eval_every=100_000, lr=1e-5)
    seen = []

    def listen(event):
        if event["kind"] in ("step", "log"):
            seen.append(time.time())
            if len(seen) > 1 and seen[-1] - seen[0] > float(os.environ.get("SPEED_SECONDS", "8")):
                raise Enough

    try:
        fit(spec.settings, WORK / "speed" / job["name"], listeners=[listen])
    except Enough:
        pass
    half = [t for t in seen if t > seen[0] + (seen[-1] - seen[0]) / 2]
    append("speed.jsonl", {"job": job["name"], "arm": job["arm"], "steps_per_second": round((len(half) - 1) / (half[-1] - half[0]), 1)})


def do_run(job, execute):
    spec = spec_of(job["arm"], job["seed"])
    execute(spec, WORK)
    if spec.name == "anyorder-seed0":
        parts(spec.directory(WORK) / "fit" / "model")


def do_variant(job, execute):
    spec = spec_of(job["arm"], job["seed"], label=job["label"], **job.get("fit", {}))
    execute(spec, WORK / "variants")
    shutil.rmtree(spec.directory(WORK / "variants") / "fit", ignore_errors=True)


def do_merging(job, execute):
    from layershuffle.study.plan import tasks_of

    execute_in(next(t for t in tasks_of(study()) if t.name == job["name"]), execute)


def do_analysis(job, execute):
    from layershuffle.study.plan import tasks_of

    execute_in(next(t for t in tasks_of(study()) if t.name == job["task"]), execute)


def execute_in(task, execute):
    task.directory(WORK).mkdir(parents=True, exist_ok=True)
    execute(task, WORK)


def do_probed(job, execute):
    """The base with its head, before any refining."""
    from layershuffle.evaluation import evaluate_spec, score_rows
    from layershuffle.results import write_rows

    plan = study()
    settings = plan.evaluate.model_copy(update={"modes": "sequential,arbitrary,kept:9,kept:6,kept:3,kept:9:arbitrary,kept:6:arbitrary,kept:3:arbitrary"})
    scores = evaluate_spec(plan.model, plan.data, settings=settings).scores
    write_rows(WORK / "probed.csv", score_rows(scores, method="probed", seed=0, draw="pass"))


def do_sure(job, execute):
    """Answer as soon as the head is sure after a block: blocks used against accuracy."""
    import torch

    from layershuffle.data import DataOptions, open_data
    from layershuffle.models import image_view, load, logits_of
    from layershuffle.orders import ExecutionOrder
    from layershuffle.policies import Sequential, Shuffled
    from layershuffle.stack import depth_of
    from layershuffle.trie import build_trie, forward_trie

    plan = study()
    for arm in MAIN:
        model = load(f"dir:{WORK / 'runs' / f'{arm}-seed{job['seed']}' / 'fit'}").to(device()).eval()
        depth = depth_of(model)
        data = open_data(plan.data, image_view(model), options=DataOptions(train=False))
        test = data.splits["test"].dataset
        keys, labels = torch.tensor(test.rows, device=device()), torch.tensor(test.labels, device=device())
        drawn = [("sequential", 0, Sequential().draw(depth, seed=7, step=0))]
        drawn += [("arbitrary", i, Shuffled().draw(depth, seed=7, step=i)) for i in range(1 if SMALL else 5)]
        for mode, index, order in drawn:
            prefixes = [ExecutionOrder(tuple(order)[:k], depth) for k in range(1, depth + 1)]
            parts = []
            with torch.inference_mode():
                for chunk in keys.split(2000):
                    images, row = data.finish(chunk), {}
                    for ends, logits in forward_trie(model, images, trie=build_trie(prefixes), forward=lambda x: logits_of(model(x))):
                        row.update({end: logits.float() for end in ends})
                    parts.append(torch.stack([row[k] for k in range(depth)]))
            sure, guess = torch.cat(parts, dim=1).softmax(-1).max(-1)
            for k in range(depth):
                append("sure.jsonl", {"arm": arm, "seed": job["seed"], "mode": mode, "order": index, "rule": f"{k + 1} blocks",
                                      "blocks": k + 1, "top1": 100 * (guess[k] == labels).float().mean().item()})
            for threshold in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999):
                reached = sure >= threshold
                reached[-1] = True
                stop = reached.float().argmax(0)
                right = guess.gather(0, stop[None])[0] == labels
                append("sure.jsonl", {"arm": arm, "seed": job["seed"], "mode": mode, "order": index, "rule": f"sure {threshold}",
                                      "blocks": (stop + 1).float().mean().item(), "top1": 100 * right.float().mean().item()})


def do_held(job, execute):
    """Refine on seven classes; probe the features of the three others."""
    from layershuffle.models import load
    from layershuffle.training import fit

    spec = spec_of(job["arm"], job["seed"], data=study().data + "7")
    place = WORK / "held" / job["name"]
    fit(spec.settings, place)
    if job["arm"] == "baseline" and job["seed"] == 0:
        probe(load(study().model), "untouched", 0)
    probe(load(f"dir:{place}"), job["arm"], job["seed"])
    shutil.rmtree(place, ignore_errors=True)


def probe(model, arm, seed):
    import torch
    import torch.nn.functional as F

    import fashion_dinov2_data
    from layershuffle.models import host_of, image_view
    from layershuffle.policies import Sequential, Shuffled
    from layershuffle.stack import depth_of, running

    model = model.to(device()).eval()
    stored = fashion_dinov2_data.stored()
    labels = torch.cat([stored["train_labels"], stored["test_labels"]]).long()
    chosen = torch.tensor([i for i, y in enumerate(labels.tolist()) if y in fashion_dinov2_data.HELD])
    first_test = len(stored["train_labels"])
    finish = fashion_dinov2_data.KeyFinish(view=image_view(model))
    y = torch.searchsorted(torch.tensor(fashion_dinov2_data.HELD), labels[chosen]).to(device())
    is_train = (chosen < first_test).to(device())
    host, kept = host_of(model), []
    with host.classifier.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].float())):
        drawn = [("sequential", 0, Sequential().draw(depth_of(model), seed=7, step=0))]
        drawn += [("arbitrary", i, Shuffled().draw(depth_of(model), seed=7, step=i)) for i in range(3)]
        for mode, index, order in drawn:
            kept.clear()
            with torch.no_grad(), running(model, order):
                for chunk in chosen.to(device()).split(2000):
                    model(finish(chunk))
            x = torch.cat(kept)
            train, test, y_train, y_test = x[is_train], x[~is_train], y[is_train], y[~is_train]
            near = (F.normalize(test, dim=1) @ F.normalize(train, dim=1).T).topk(10).indices
            votes = F.one_hot(y_train[near], 3).sum(1)
            knn = 100 * (votes.argmax(1) == y_test).float().mean().item()
            mean, std = train.mean(0), train.std(0) + 1e-6
            train, test = (train - mean) / std, (test - mean) / std
            head = torch.nn.Linear(x.shape[1], 3).to(device())
            torch.nn.init.zeros_(head.weight)
            optimiser = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

            def loss():
                optimiser.zero_grad()
                value = F.cross_entropy(head(train), y_train) + 1e-3 * head.weight.square().sum()
                value.backward()
                return value

            optimiser.step(loss)
            with torch.no_grad():
                linear = 100 * (head(test).argmax(1) == y_test).float().mean().item()
            append("held.jsonl", {"arm": arm, "seed": seed, "mode": mode, "order": index, "knn": knn, "linear": linear})


def parts(model: Path) -> None:
    """The weights of a model in fp16, in files that may leave the machine."""
    import torch
    from safetensors.torch import load_file, save

    weights = {k: v.half() if v.dtype == torch.float32 else v for k, v in load_file(model / "model.safetensors").items()}
    content = save(weights)
    for number in range(0, len(content), 15 << 20):
        (OUT / f"anyorder0.part{number // (15 << 20)}").write_bytes(content[number : number + (15 << 20)])
    for file in model.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, WORK / "results" / f"anyorder0-{file.name}")


def work(number: int) -> None:
    begun = time.time()
    install()
    import torch  # noqa: F401

    from layershuffle.machine import imports_stay

    with imports_stay():
        import layershuffle.evaluation
        import layershuffle.training  # noqa: F401
    print(f"worker {number} ready after {time.time() - begun:.1f} s", flush=True)
    todo = jobs()
    claims = WORK / "claims"
    while todo:
        ended = {p.name for p in (WORK / "ended").iterdir()}
        todo = [j for j in todo if not (claims / j["name"]).exists()]
        job = next((j for j in todo if ended.issuperset(j["needs"])), None)
        if job is None:
            time.sleep(0.2)
            continue
        try:
            (claims / job["name"]).mkdir()
        except FileExistsError:
            continue
        begun, state = time.time(), "done"
        try:
            do(job)
        except BaseException as error:  # noqa: BLE001
            state = f"{type(error).__name__}: {error}"[:300]
            (WORK / "results" / f"failed-{job['name']}.txt").write_text(traceback.format_exc())
        append("times.jsonl", {"job": job["name"], "worker": number, "seconds": round(time.time() - begun, 1),
                               "at": round(time.time() - float(os.environ["BEGUN"]), 1), "state": state})
        print(f"{time.time() - float(os.environ['BEGUN']):6.1f} s: {job['name']} took {time.time() - begun:.1f} s: {state}", flush=True)
        (WORK / "ended" / job["name"]).touch()


# --- the parent -----------------------------------------------------------------------------------

def pack() -> None:
    """All small files of the study as one archive, replaced at once."""
    stage = OUT / "results.tar.gz.new"
    with tarfile.open(stage, "w:gz", compresslevel=1) as tar:
        for path in sorted(WORK.rglob("*")):
            inside = path.relative_to(WORK)
            small = path.suffix in (".csv", ".json", ".jsonl", ".txt", ".yaml") and "model" not in inside.parts
            if path.is_file() and small and path.stat().st_size < 4 << 20:
                try:
                    tar.add(path, str(inside))
                except FileNotFoundError:
                    pass
    stage.rename(OUT / "results.tar.gz")


def prepare() -> None:
    """Pixels at 56 x 56 and the base model, from what was carried."""
    import torch
    from PIL import Image
    from torch.nn import functional as F  # noqa: F401

    from fashion_dinov2_data import NAMES
    from layershuffle.data.transforms import PixelTransform, PlainTransform
    from layershuffle.data.view import ImageView

    (WORK / "data/fashion-dinov2").mkdir(parents=True, exist_ok=True)
    if not (WORK / "data/fashion-dinov2/base").exists() and os.environ.get("BASE"):
        from safetensors.torch import load_file, save_file

        shutil.copytree(os.environ["BASE"], WORK / "data/fashion-dinov2/base")
        for path in (WORK / "data/fashion-dinov2/base").rglob("model.safetensors"):
            weights = {k: v.float() for k, v in load_file(path).items()}
            save_file(weights, path, metadata={"format": "pt"})
    if not os.environ.get("IMAGES"):
        return
    import numpy as np

    view = ImageView(channels=1, height=56, width=56, mean=(0.5,), std=(0.5,), resize="squash")
    found = {}
    for name, prefix in (("train", "train"), ("test", "t10k")):
        place = Path(os.environ["IMAGES"])
        limit = int(os.environ.get("LIMIT_" + name, "1000000"))
        raw = np.frombuffer(gzip.decompress((place / f"{prefix}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16).reshape(-1, 28, 28)[:limit]
        labels = np.frombuffer(gzip.decompress((place / f"{prefix}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)[:limit]
        if name == "train":
            transform = PixelTransform(view)
            sized = [transform(torch.tensor(image)[None]) for image in raw]
        else:
            transform = PlainTransform(view)
            sized = [transform(Image.fromarray(image)) for image in raw]
        found[name] = torch.stack(sized)
        found[f"{name}_labels"] = torch.tensor(labels.astype("int64"))
    torch.save(found, WORK / "pixels.pt")
    assert len(NAMES) == 10
    print({k: tuple(v.shape) for k, v in found.items()}, flush=True)


def main() -> None:
    seconds, processes = float(sys.argv[2]), int(sys.argv[3])
    begun = time.time()
    os.environ["BEGUN"] = str(begun)
    for name in ("claims", "ended", "results"):
        (WORK / name).mkdir(parents=True, exist_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    os.chdir(WORK)
    if not (WORK / "pixels.pt").exists():
        prepare()
        print(f"prepared after {time.time() - begun:.1f} s", flush=True)
    from layershuffle._version import __version__

    plan = {"schema": 1, "code_version": __version__, "recipe": study().model_dump(mode="json")}
    (WORK / "plan.json").write_text(json.dumps(plan))
    workers = [
        subprocess.Popen([sys.executable, str(CODE / "fashion_dinov2.py"), "work", str(n)], stdout=(WORK / "results" / f"log{n}.txt").open("w"), stderr=subprocess.STDOUT)
        for n in range(processes)
    ]
    packed = time.time()
    while time.time() - begun < seconds and any(w.poll() is None for w in workers):
        time.sleep(0.5)
        if time.time() - packed > 25:
            pack()
            packed = time.time()
    for w in workers:
        if w.poll() is None:
            w.kill()
    for w in workers:
        w.wait()
    (WORK / "results" / "end.txt").write_text(f"{time.time() - begun:.1f} s, processes {processes}, steps {STEPS}\n")
    pack()
    rows = [json.loads(x) for x in (WORK / "times.jsonl").read_text().splitlines()]
    print(f"{sum(r['state'] == 'done' for r in rows)} jobs done, {[(r['job'], r['state'][:120]) for r in rows if r['state'] != 'done']}")


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(int(sys.argv[2]))
    elif sys.argv[1] == "prepare":
        WORK.mkdir(parents=True, exist_ok=True)
        os.chdir(WORK)
        prepare()
    else:
        main()
