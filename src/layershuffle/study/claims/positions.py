"""Claims on what blocks know of their position (section 4.1, Figure 4)."""

from __future__ import annotations

from layershuffle.study.claims.base import Judgement, Verdict, claim
from layershuffle.study.evidence import Evidence

_PART = ("sources", "the model's own prediction part")  # see `analysis/position.py`
_PROBE = ("sources", "probe on the block's output")


@claim(
    says="Blocks know their position: it is predicted right in 99.99 % of cases",
    where="section 4.1",
    criterion="at least 99 % on test images; partly from 90 %",
)
def position_is_predicted(e: Evidence) -> Judgement:
    predict, plain = "layershuffle-predict", "layershuffle"
    share = e.fact("position", predict, path=(*_PART, "accuracy"))
    if share is None:
        return None
    words = f"{share:.2f} % by the trained heads"
    for arm in (predict, plain):
        probe = e.fact("position", arm, path=(*_PROBE, "accuracy"))
        if probe is not None:
            words += f"; {probe:.2f} % by a linear probe of {arm}'s frozen outputs"
    verdict: Verdict = "holds partly" if share >= 90 else "does not hold"
    return ("holds" if share >= 99 else verdict), words


@claim(
    says="A block's output depends on its position",
    where="Figure 4",
    criterion=(
        "neighbours of an output share its position (+-1) at least 1.5 times as often as by chance"
    ),
)
def outputs_depend_on_position(e: Evidence) -> Judgement:
    share = e.fact("umap", "layershuffle", path=("tokens", "mean", "purity"))
    chance = e.fact("umap", "layershuffle", path=("tokens", "mean", "chance"))
    if share is None or chance is None:
        return None
    words = f"{100 * share:.0f} % of neighbours (mean token), {100 * chance:.0f} % by chance"
    verdict: Verdict = "holds partly" if share > chance else "does not hold"
    return ("holds" if share >= 1.5 * chance else verdict), words


@claim(
    says="Outputs at the first positions lie apart from the rest",
    where="Figure 4, section 4.3",
    criterion="outputs at position 0, or at 0 and 1, detached (`analysis/umap.py`) in at least "
    "half of the blocks, by class or mean token; partly if in any block",
)
def early_positions_lie_apart(e: Evidence) -> Judgement:
    blocks = e.fact("umap", "layershuffle", path=("blocks",))
    found = {
        token: e.fact("umap", "layershuffle", path=("tokens", token, "detached_blocks"))
        for token in ("class", "mean")
    }
    known = {token: count for token, count in found.items() if count is not None}
    if blocks is None or not known:
        return None
    said = [f"{count:.0f} of {blocks:.0f} blocks ({token})" for token, count in known.items()]
    most = max(known.values())
    verdict: Verdict = "holds partly" if most > 0 else "does not hold"
    return ("holds" if most >= blocks / 2 else verdict), f"detached in {', '.join(said)}"
