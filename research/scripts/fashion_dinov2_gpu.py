# Ran at commit 040f2cc3, on one GPU: docs/results/fashion-dinov2 has the results.
"""Trains arms of `fashion-dinov2` and of `fashion-dinov2-320` on one GPU, many at a time.

    fashion_dinov2_gpu.py prepare IMAGES   # IMAGES: the .gz files of Fashion-MNIST
    fashion_dinov2_gpu.py train SECONDS PROCESSES

A process per core takes the next job that is ready. The images stand in the memory of the GPU in
place of files; everything else is the code of `layershuffle reproduce`. WORK, OUT and BASE name
directories: of the work, of what leaves the machine, and of the base model in fp16.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from functools import cache
from pathlib import Path

CODE = Path(__file__).resolve()
WORK, OUT = Path(os.environ["WORK"]), Path(os.environ["OUT"])
STEPS, RATE_STEPS = int(os.environ.get("STEPS", "2000")), int(os.environ.get("RATE_STEPS", "500"))
SMALL = os.environ.get("SMALL") == "1"  # a trial on a CPU
RECIPES = {
    "short": CODE.parents[2] / "src/layershuffle/assets/recipes/fashion-dinov2.yaml",
    "long": CODE.parents[1] / "recipes/fashion-dinov2-320.yaml",
}
RATES = {
    ("long", "anyorder"): (1e-4, 2e-4, 4e-4),
    ("long", "anyorder-3-distinct"): (1e-4, 2e-4, 4e-4),
    ("long", "layershuffle"): (1e-4, 2e-4, 4e-4),
    ("long", "baseline"): (2e-5, 5e-5, 1e-4),
    ("short", "anyorder"): (5e-5, 1e-4, 2e-4, 4e-4),
}
# Contiguous groups of similar blocks of the base (by CKA), each with the block most like the others.
GROUPS = (1, 1, 6, 6, 6, 6, 6, 6, 6, 6, 11, 11)
NAMES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
HELD = (2, 4, 6)  # classes that nothing is refined on, for the probe of features


# --- images in the memory of the device -----------------------------------------------------------


@cache
def stored():
    import torch

    return torch.load(WORK / "pixels.pt", mmap=True, weights_only=True)


@cache
def on_device(device):
    import torch

    with torch.inference_mode(False):
        return torch.cat([stored()["train"], stored()["test"]]).to(device)


class Keys:
    """Rows of the stored pixels, with labels."""

    def __init__(self, rows, labels):
        self.rows, self.labels = rows, labels

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.labels[i]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyFinish:
    view: object

    def __call__(self, keys):
        from layershuffle.data.transforms import PixelFinish

        return PixelFinish(self.view)(on_device(keys.device)[keys].expand(-1, 3, -1, -1))


def open_source(request):
    """As `hf:` does, over stored pixels; of "data7" seven classes."""
    from layershuffle.data.contract import ImageData, Split, stratified_holdout

    data, labels = stored(), stored()["train_labels"].tolist()
    tests = data["test_labels"].tolist()
    seen = set(range(10)) - set(HELD if request.place.endswith("7") else ())
    train, held = stratified_holdout(labels, request.options.holdout or 0.05)
    splits = {}
    for name, rows, of, offset in (
        ("train", train, labels, 0), ("holdout", held, labels, 0), ("test", range(len(tests)), tests, len(labels)),
    ):
        rows = [row for row in rows if of[row] in seen]
        splits[name] = Split(dataset=Keys([offset + row for row in rows], [of[row] for row in rows]), size=len(rows))
    note = f"the holdout is {len(held)} of {len(labels)} training images, a share of 0.05 per class, the same for every seed"
    return ImageData(spec=request.spec, classes=NAMES, splits=splits, finish=KeyFinish(view=request.view), notes=(note,))


def prepare(place: Path) -> None:
    """Pixels at 56 x 56, as `hf:` gives them."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from PIL import Image

    from layershuffle.data.transforms import PlainTransform
    from layershuffle.image_view import ImageView

    view = ImageView(channels=1, height=56, width=56, mean=(0.5,), std=(0.5,), interpolation="bicubic", resize="squash")
    found = {}
    for name, prefix in (("train", "train"), ("test", "t10k")):
        limit = int(os.environ.get("LIMIT", "1000000"))
        raw = gzip.decompress((place / f"{prefix}-images-idx3-ubyte.gz").read_bytes())
        pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)[:limit]
        labels = np.frombuffer(gzip.decompress((place / f"{prefix}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
        if name == "train":
            sized = F.interpolate(torch.tensor(pixels)[:, None], size=(56, 56), mode=view.interpolation, antialias=True)
        else:
            sized = torch.stack([PlainTransform(view)(Image.fromarray(image)) for image in pixels])
        found |= {name: sized, f"{name}_labels": torch.tensor(labels[:limit].astype("int64"))}
    torch.save(found, WORK / "pixels.pt")
    print({k: tuple(v.shape) for k, v in found.items()}, flush=True)


def prepare_base() -> None:
    """The base in fp32, from what was carried; with BASE=random of the same shape, for a trial."""
    import torch
    from safetensors.torch import load_file, save_file

    target = WORK / "data/fashion-dinov2/base"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(CODE.parents[2] / ".gpu/base", target)
    for path in target.rglob("model.safetensors"):
        path.unlink()
    source = CODE.parents[2] / ".gpu/base/model.safetensors"
    if source.exists():
        weights = {k: v.float() for k, v in load_file(source).items()}
    else:
        from transformers import Dinov2Config, Dinov2ForImageClassification

        torch.manual_seed(0)
        weights = Dinov2ForImageClassification(Dinov2Config.from_pretrained(target)).state_dict()
    save_file({k: v.contiguous() for k, v in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})


# --- jobs -----------------------------------------------------------------------------------------


def jobs() -> list[dict]:
    """What there is to do, the most valuable first."""
    todo = []

    def add(name, kind, needs=(), **arguments):
        todo.append({"name": name, "kind": kind, "needs": list(needs), **arguments})

    for (study, arm), rates in RATES.items():
        for lr in rates:
            add(f"rate-{study}-{arm}-{lr:g}", "rate", study=study, arm=arm, lr=lr)

    def rates_of(study, arm):
        return [f"rate-{study}-{arm}-{lr:g}" for lr in RATES.get((study, arm), ())]

    def run(study, arm, seed):
        add(f"{study}-{arm}-seed{seed}", "task", rates_of(study, arm), study=study, task=f"{arm}-seed{seed}")

    for seed in range(3):
        for arm in ("anyorder", "anyorder-3-distinct", "layershuffle", "baseline"):
            run("long", arm, seed)
    for seed in range(5):
        run("short", "anyorder", seed)
    add("sure", "sure", [f"long-{arm}-seed0" for arm in ("anyorder", "layershuffle", "baseline")])
    for arm in ("anyorder", "layershuffle", "baseline"):
        add(f"held-{arm}", "held", rates_of("short", arm), arm=arm)
    teacher = {"teacher": "long-baseline-seed0"}
    tied = rates_of("long", "anyorder-3-distinct")
    for label, arm, needs, extra in (
        ("anyorder-taught", "anyorder", [*rates_of("long", "anyorder"), "long-baseline-seed0"], teacher),
        ("anyorder-3-distinct-groups", "anyorder-3-distinct", tied, {"groups": GROUPS}),
        ("anyorder-3-distinct-groups-taught", "anyorder-3-distinct", [*tied, "long-baseline-seed0"], teacher | {"groups": GROUPS}),
        ("anyorder-exit-1", "anyorder", rates_of("long", "anyorder"), {"fit": {"exit_weight": 1.0, "self_distillation": 1.0}}),
    ):
        add(f"{label}-seed0", "variant", needs, arm=arm, label=label, extra=extra)
    for seed in range(3):
        run("short", "anyorder-3-distinct", seed)
    add("merging-short-anyorder", "task", [f"short-anyorder-seed{s}" for s in range(5)], study="short", task="merging-anyorder")
    for arm in ("anyorder", "layershuffle", "baseline"):
        add(f"merging-long-{arm}", "task", [f"long-{arm}-seed{s}" for s in range(3)], study="long", task=f"merging-{arm}")
    if "ONLY" in os.environ:
        keep = os.environ["ONLY"].split(",")
        todo = [job for job in todo if job["name"] in keep or job["kind"] in keep]
        names = {job["name"] for job in todo}
        todo = [job | {"needs": [n for n in job["needs"] if n in names]} for job in todo]
    return todo


def study_of(name: str):
    """The recipe, with the rates that were found."""
    import yaml

    from layershuffle.study.settings import StudySettings

    fields = yaml.safe_load(RECIPES[name].read_text())
    fields["fit"] |= {"steps": STEPS, "eval_every": max(1, STEPS // 4)}
    fields["analyses"] = []
    if name == "long" and "BATCH" in os.environ:
        fields["fit"]["batch_size"] = int(os.environ["BATCH"])
    for arm in fields["arms"]:
        lr = best_rate(name, arm.get("name", arm["method"]))
        if lr is not None:
            arm["fit"] = arm.get("fit", {}) | {"lr": lr}
    if SMALL:
        fields["fit"] |= {"precision": "fp32", "batch_size": 8, "warmup": 1, "eval_batch_size": 20}
        fields["evaluate"] |= {"precision": "fp32", "num_orders": 2}
        fields["merging"][0]["options"] |= {"precision": "fp32", "merges": 2}
        for arm in fields["arms"]:
            arm.get("evaluate", {}).pop("modes", None)
    return StudySettings(**fields)


def best_rate(study: str, arm: str) -> float | None:
    path = WORK / "rates.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    values = {r["lr"]: r["value"] for r in rows if (r["study"], r["arm"]) == (study, arm)}
    return min(values, key=values.get) if values else None


def task_of(study: str, name: str):
    from layershuffle.study.plan import make_plan

    return next(task for task in make_plan(study_of(study)).tasks if task.name == name)


def do_rate(job) -> None:
    """500 steps of one model; the held-out cross-entropy, in order and in any order unless ordinary."""
    from layershuffle.training import fit

    settings = task_of(job["study"], f"{job['arm']}-seed0").settings
    settings = settings.model_copy(update={"seed": 1000, "lr": job["lr"], "steps": RATE_STEPS, "eval_every": RATE_STEPS})
    scores, place = {}, WORK / "rates" / job["name"]
    begun = time.time()
    try:
        fit(settings, place, on_event=lambda event: scores.update(event) if event["kind"] == "scores" else None)
        own, other = scores["eval_sequential_cross_entropy"], scores["eval_arbitrary_cross_entropy"]
    except Exception as error:
        if "became" not in str(error):
            raise
        own = other = float("inf")
    value = own if job["arm"] == "baseline" else (own + other) / 2
    append("rates.jsonl", {**{k: job[k] for k in ("study", "arm", "lr")}, "value": value, "sequential": own, "arbitrary": other,
                           "steps": RATE_STEPS, "seconds": round(time.time() - begun, 1)})
    shutil.rmtree(place, ignore_errors=True)


def do_task(job) -> None:
    from layershuffle.study.store import record

    task, out = task_of(job["study"], job["task"]), WORK / job["study"]
    task.directory(out).mkdir(parents=True, exist_ok=True)
    record(task, out, say=lambda text, share: None)
    if job["name"] in ("long-anyorder-seed0", "long-anyorder-3-distinct-seed0"):
        carry_home(task.directory(out) / "fit/model", job["name"].removesuffix("-seed0"))


def do_variant(job) -> None:
    import layershuffle.core.tying as tying
    from layershuffle.core.methods import Method

    extra, spec = job["extra"], task_of("long", f"{job['arm']}-seed0")
    fields = spec.settings.model_dump() | extra.get("fit", {})
    spec = dataclasses.replace(spec, name=job["name"], arm=job["label"], settings=type(spec.settings)(**fields))
    middle, plain = tying.middle_blocks, Method.loss_and_logits
    if "groups" in extra:
        tying.middle_blocks = lambda distinct, depth: tuple(extra["groups"])
    if "teacher" in extra:
        Method.loss_and_logits = taught(WORK / "long/runs/baseline-seed0/fit", plain)
    try:
        place = spec.directory(WORK / "variants")
        place.mkdir(parents=True, exist_ok=True)
        result = spec.run(WORK / "variants", lambda text, share: None)
    finally:
        tying.middle_blocks, Method.loss_and_logits = middle, plain
    from layershuffle.results import write_rows

    write_rows(place / "rows.csv", result.rows)
    (place / "facts.json").write_text(json.dumps(result.model_dump(mode="json")))


def taught(directory: Path, plain):
    """The loss of a method whose labels and frozen ordinary model teach in equal parts."""
    import torch
    import torch.nn.functional as F

    import layershuffle as ls
    from layershuffle.core.tensors import logits_of

    model = ls.load(f"dir:{directory}").to(device()).eval().requires_grad_(False)

    def loss_and_logits(self, student, images, labels, **place):
        with torch.no_grad():
            soft = logits_of(model(images)).float().softmax(-1)
        target = (soft + F.one_hot(labels, soft.shape[-1])) / 2
        return plain(self, student, images, labels, **place, criterion=lambda logits, _: F.cross_entropy(logits, target))

    return loss_and_logits


def do_sure(job) -> None:
    """Blocks used and accuracy, if an answer is given as soon as the head is sure."""
    import torch

    import layershuffle as ls
    from layershuffle.data import DataOptions, open_data
    from layershuffle.models import image_view

    for arm in ("baseline", "layershuffle", "anyorder"):
        model = ls.load(f"dir:{WORK / f'long/runs/{arm}-seed0/fit'}").to(device()).eval()
        data = open_data(study_of("long").data, image_view(model), options=DataOptions(train=False))
        test = data.splits["test"].dataset
        keys, labels = (torch.tensor(x, device=device()) for x in (test.rows, test.labels))
        batches = [(data.finish(k), y) for k, y in zip(keys.split(2000), labels.split(2000), strict=True)]
        for stop in (None, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999):
            for score in ls.evaluate(model, batches, modes="sequential,arbitrary", num_orders=5, seed=7, stop=stop):
                row = {"arm": arm, "stop": stop, "mode": score.mode.order, "order": score.index, "top1": score.top1}
                append("sure.jsonl", row | {k: getattr(score, k) for k in ("steps", "blocks", "blocks_used", "kept") if hasattr(score, k)})


def do_held(job) -> None:
    """Refine on seven classes; 10 nearest neighbours and a linear probe of the three others."""
    import layershuffle as ls
    from layershuffle.training import fit

    settings = task_of("short", f"{job['arm']}-seed0").settings
    settings = settings.model_copy(update={"data": settings.data + "7"})
    place = WORK / "held" / job["arm"]
    fit(settings, place)
    if job["arm"] == "baseline":
        probe(ls.load(study_of("short").model), "untouched")
    probe(ls.load(f"dir:{place}"), job["arm"])


def probe(model, arm) -> None:
    import torch
    import torch.nn.functional as F

    import layershuffle as ls
    from layershuffle.core.policies import Sequential, Shuffled
    from layershuffle.core.stack import depth_of, running
    from layershuffle.models import image_view

    model = ls.wrap(model).to(device()).eval()
    labels = torch.cat([stored()["train_labels"], stored()["test_labels"]])
    chosen = torch.tensor([i for i, y in enumerate(labels.tolist()) if y in HELD])
    y = torch.searchsorted(torch.tensor(HELD), labels[chosen]).to(device())
    is_train = (chosen < len(stored()["train_labels"])).to(device())
    finish, seen = KeyFinish(view=image_view(model)), []
    head = next(m for n, m in model.named_modules() if n.endswith("classifier"))
    with head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float())):
        drawn = [("sequential", 0, Sequential().draw(depth_of(model), seed=7, step=0))]
        drawn += [("arbitrary", i, Shuffled().draw(depth_of(model), seed=7, step=i)) for i in range(3)]
        for mode, index, order in drawn:
            seen.clear()
            with torch.no_grad(), running(model, order):
                for chunk in chosen.to(device()).split(2000):
                    model(finish(chunk))
            x = torch.cat(seen)
            train, test, y_train, y_test = x[is_train], x[~is_train], y[is_train], y[~is_train]
            near = (F.normalize(test, dim=1) @ F.normalize(train, dim=1).T).topk(10).indices
            knn = 100 * (F.one_hot(y_train[near], 3).sum(1).argmax(1) == y_test).float().mean().item()
            mean, std = train.mean(0), train.std(0) + 1e-6
            train, test = (train - mean) / std, (test - mean) / std
            linear = torch.nn.Linear(x.shape[1], 3).to(device())
            torch.nn.init.zeros_(linear.weight)
            optimiser = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

            def loss():
                optimiser.zero_grad()
                value = F.cross_entropy(linear(train), y_train) + 1e-3 * linear.weight.square().sum()
                value.backward()
                return value

            optimiser.step(loss)
            with torch.no_grad():
                right = 100 * (linear(test).argmax(1) == y_test).float().mean().item()
            append("held.jsonl", {"arm": arm, "mode": mode, "order": index, "knn": knn, "linear": right})


def do_speed(job) -> None:
    """Steps per second of one arm, while others train."""
    from layershuffle.training import fit

    settings = task_of("long", f"{job['arm']}-seed0").settings
    settings = settings.model_copy(update={"steps": 100_000, "eval_every": 100_000, "lr": 1e-5, **job["fit"]})
    seen = []

    class Enough(Exception):
        pass

    def listen(event):
        if event["kind"] in ("step", "log"):
            seen.append(time.time())
            if seen[-1] - seen[0] > 8:
                raise Enough

    try:
        fit(settings, WORK / "speed" / job["name"], on_event=listen)
    except Enough:
        half = [t for t in seen if t > seen[0] + 4]
        print(f"{job['name']}: {(len(half) - 1) / (half[-1] - half[0]):.1f} steps/s", flush=True)
        append("speed.jsonl", {"job": job["name"], "steps_per_second": (len(half) - 1) / (half[-1] - half[0])})


def carry_home(model: Path, name: str) -> None:
    """The weights in fp16, equal ones once, in files that may leave the machine."""
    import torch
    from safetensors.torch import load_file, save

    weights, first, same = load_file(model / "model.safetensors"), {}, {}
    for key, value in weights.items():
        equal = next((k for k in first if first[k].shape == value.shape and torch.equal(first[k], value)), None)
        if equal is None:
            first[key] = value
        else:
            same[key] = equal
    content = save({k: v.half() if v.dtype == torch.float32 else v for k, v in first.items()}, metadata={"same": json.dumps(same)})
    for number, start in enumerate(range(0, len(content), 15 << 20)):
        (OUT / f"{name}.part{number}").write_bytes(content[start : start + (15 << 20)])
    (WORK / "models" / name).mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, WORK / "models" / name / file.name)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def append(name: str, row: dict) -> None:
    """A line of JSON, whole whichever process writes it."""
    with (WORK / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


# --- processes ------------------------------------------------------------------------------------


def work(number: int, begun: float) -> None:
    """Take jobs until none is left, on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})  # one core: no loader processes either
    sys.path.insert(0, str(CODE.parent))
    import torch

    from layershuffle.data import loading

    loading.SOURCES["hf"] = dataclasses.replace(loading.SOURCES["hf"], module=CODE.stem, extra=None)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    from layershuffle.machine import imports_stay

    with imports_stay():
        import layershuffle.scoring
        import layershuffle.training  # noqa: F401
    print(f"worker {number} ready after {time.time() - begun:.1f} s", flush=True)
    todo = jobs() + [
        {"name": f"speed-{i}", "kind": "speed", "needs": [], "arm": arm, "fit": fit}
        for i, (arm, fit) in enumerate(json.loads(os.environ.get("SPEED", "[]")))
    ]
    while todo:
        ended = {path.name for path in (WORK / "ended").iterdir()}
        todo = [job for job in todo if not (WORK / "claims" / job["name"]).exists()]
        job = next((job for job in todo if ended.issuperset(job["needs"])), None)
        if job is None:
            time.sleep(0.2)
            continue
        try:
            (WORK / "claims" / job["name"]).mkdir()
        except FileExistsError:
            continue
        started, state = time.time(), "done"
        try:
            globals()["do_" + job["kind"]](job)
        except BaseException as error:  # noqa: BLE001
            state = f"{type(error).__name__}: {error}"[:300]
            (WORK / "logs" / f"failed-{job['name']}.txt").write_text(traceback.format_exc())
        append("times.jsonl", {"job": job["name"], "worker": number, "seconds": round(time.time() - started, 1),
                               "at": round(time.time() - begun, 1), "state": state})
        (WORK / "ended" / job["name"]).touch()


def pack() -> None:
    """All small files as one archive, replaced at once."""
    stage = OUT / "results.tar.gz.new"
    with tarfile.open(stage, "w:gz", compresslevel=1) as tar:
        for path in sorted(WORK.rglob("*")):
            small = path.suffix in (".csv", ".json", ".jsonl", ".txt", ".yaml")
            if path.is_file() and small and "base" not in path.parts and path.stat().st_size < 4 << 20:
                try:
                    tar.add(path, str(path.relative_to(WORK)))
                except FileNotFoundError:
                    pass
    stage.rename(OUT / "results.tar.gz")


def train(seconds: float, processes: int) -> None:
    begun = time.time()
    for name in ("claims", "ended", "logs", "long", "short", "models"):
        (WORK / name).mkdir(parents=True, exist_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(CODE.parents[2] / "src") + ":" + os.environ.get("PYTHONPATH", "")
    os.chdir(WORK)
    prepare_base()
    from layershuffle.study.plan import write_plan

    for name in RECIPES:
        write_plan(study_of(name), WORK / name)
    workers = [
        subprocess.Popen([sys.executable, str(CODE), "work", str(n), str(begun)], stdout=(WORK / f"logs/log{n}.txt").open("w"), stderr=subprocess.STDOUT)
        for n in range(processes)
    ]
    packed = shown = time.time()
    while time.time() - begun < seconds and any(w.poll() is None for w in workers):
        time.sleep(0.5)
        if time.time() - packed > 25:
            pack()
            packed = time.time()
        if time.time() - shown > 100:
            shown = time.time()
            print(f"{shown - begun:.0f} s: {len(list((WORK / 'ended').iterdir()))} jobs ended", flush=True)
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
        worker.wait()
    for name in RECIPES:
        write_plan(study_of(name), WORK / name)
    (WORK / "logs/end.txt").write_text(f"{time.time() - begun:.1f} s, processes {processes}, steps {STEPS}\n")
    pack()
    rows = [json.loads(line) for line in (WORK / "times.jsonl").read_text().splitlines()]
    for row in rows:
        print(f"{row['at']:6.1f} {row['seconds']:6.1f} {row['job']} {row['state'][:100]}")


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "prepare":
        WORK.mkdir(parents=True, exist_ok=True)
        prepare(Path(sys.argv[2]))
    else:
        train(float(sys.argv[2]), int(sys.argv[3]))
