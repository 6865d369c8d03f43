"""The last workflow: every site measures its own network on its own test images; the server gathers the means."""

import math
from collections.abc import Mapping
from typing import Any

from feddp import protocol
from feddp.errors import ContributionError
from feddp.flare import messages
from feddp.flare.exchange import is_sealed
from feddp.flare.stage import Answer, Stage
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA
from feddp.methods.results import ROUNDED, STD_WITHHELD, VOLUMES, WHEN, WITHHELD, gathered
from feddp.training.metrics import METRICS
from feddp.training.volumes import VOLUME_METRICS


class Evaluation(Stage):
    """Per-site results, their average over sites, and the site x model matrix of those who exchanged with consent."""

    def run(self) -> None:
        answers = self.ask(protocol.EVALUATE, messages.pack(), (), _check)
        everyone = {client.name for client in self.fl_ctx.get_engine().get_clients()}
        persistor = self.persistor
        sites = {site: self._site(site, answer) for site, answer in answers.items()}
        missing = {s: persistor.lost.get(s, f"site {s} did not evaluate") for s in sorted(everyone - sites.keys())}
        matrix = {site: self._row(site, answer) for site, answer in answers.items() if answer.scalars.get("peers")}
        shared = persistor.shared_spec.halved if self.plan.federation.half else persistor.shared_spec
        nbytes = {"shared": shared.nbytes, "personal": persistor.personal_spec.nbytes}
        results = gathered(self.plan, sites, persistor.start_round, persistor.best_round, missing, matrix, nbytes)
        if {SPECTRA, HEADS, CALIBRATE} & set(self.plan.stages):
            results["sealed"] = is_sealed(self.fl_ctx)  # what the sites exchanged
        results[ROUNDED] = is_sealed(self.fl_ctx)  # by the guards, which stand wherever there are certificates
        persistor.write_results(self.fl_ctx, results)
        self.progress("done")

    def _site(self, site: str, answer: Answer) -> dict[str, Any]:
        result = {name: answer.scalars[name] for name in (*WHEN, VOLUMES, WITHHELD, STD_WITHHELD) if name in answer.scalars}
        if SPECTRA in self.plan.stages:
            result["spectra"] = {"peers": len(self.persistor.styles.get(site, []))}
        if {HEADS, CALIBRATE} & set(self.plan.stages):
            tuned, peers = site in self.persistor.peers, len(self.persistor.peers.get(site, []))
            # without a peer the stage was more epochs of L_seg alone; a site that failed it keeps what it had before
            result["calibration"] = {"calibrated": peers > 0, "peers": peers, "tuned": tuned}
        return result

    @staticmethod
    def _row(site: str, answer: Answer) -> dict[str, Any]:
        return {**answer.scalars["peers"], site: answer.scalars["before_calibration"]}


def _check(site: str, answer: Answer) -> None:
    peers, whole = answer.scalars.get("peers"), True
    if WITHHELD not in answer.scalars or {*WHEN, "peers"} & answer.scalars.keys():  # the tables of images come together
        whole = all(is_whole(answer.scalars.get(when), METRICS, answer.scalars) for when in WHEN)
        whole &= isinstance(peers, dict) and all(is_whole(summary, METRICS, answer.scalars) for summary in peers.values())
    if VOLUMES in answer.scalars:  # of a site whose images are slices
        volumes = answer.scalars[VOLUMES]
        whole &= isinstance(volumes, dict) and volumes.keys() == set(WHEN)
        whole = whole and all(is_whole(summary, VOLUME_METRICS, answer.scalars) for summary in volumes.values())
    if not whole:
        raise ContributionError(f"site {site}: its evaluation lacks a metric, or holds one that is not a finite number")


def is_whole(summary: Any, metrics: tuple[str, ...], scalars: Mapping[str, Any]) -> bool:
    """Whether it has every metric's mean, std and n, as finite numbers (`metrics.summarize`).

    Where the answer's `scalars` say that std is withheld, it may lack that.
    """
    wanted = {"mean", "n"} if STD_WITHHELD in scalars else {"mean", "std", "n"}
    cells = [summary.get(metric) for metric in metrics] if isinstance(summary, dict) else [None]
    return all(isinstance(cell, dict) and wanted <= cell.keys() <= wanted | {"std"} for cell in cells) and all(
        isinstance(value, int | float) and math.isfinite(value) for cell in cells for value in cell.values()
    )
