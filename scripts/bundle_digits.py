"""Put a trained digits model into the package, with its scores and the recipe that made it.

layershuffle fit --recipe digits-base --out runs/digits-base
python scripts/bundle_digits.py runs/digits-base digits

layershuffle fit --recipe digits-swarm --out runs/digits-swarm
python scripts/bundle_digits.py runs/digits-swarm digits-swarm
layershuffle swarm calibrate src/layershuffle/assets/digits-swarm --data digit-pairs

layershuffle fit --recipe digits-ordinary --out runs/digits-ordinary
python scripts/bundle_digits.py runs/digits-ordinary digits-ordinary
"""

import sys
from pathlib import Path

import torch

import layershuffle as ls
from layershuffle.models import read_record
from layershuffle.scoring.evaluate_spec import evaluate_spec
from layershuffle.scoring.settings import EvalSettings

ASSETS = Path(__file__).resolve().parent.parent / "src" / "layershuffle" / "assets"
KEPT = ("method", "policy", "selected", "settings", "provenance")


def main(run: str, name: str) -> None:
    """Score the model of the run on all 5,000 test pairs and save it with its record."""
    torch.set_num_threads(1)  # it changes the last digit of the scores
    evaluation = evaluate_spec(f"dir:{run}", "digit-pairs", settings=EvalSettings(num_orders=20))
    scores = {}
    for mode in ("sequential", "arbitrary"):
        rows = [score for score in evaluation.scores if score.label == mode]
        top1, top5 = (sum(getattr(r, n) for r in rows) / len(rows) for n in ("top1", "top5"))
        scores[mode] = {"top1": round(top1, 2), "top5": round(top5, 2)}
    record = {name: value for name, value in read_record(f"{run}/model").items() if name in KEPT}
    ls.save(ls.load(f"dir:{run}"), ASSETS / name, record={**record, "scores": scores})
    print(scores)


if __name__ == "__main__":
    main(*sys.argv[1:])
