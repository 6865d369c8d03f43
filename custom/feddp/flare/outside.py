"""IOP-FL's "outside" (004, section III-C) as a workflow: consenting donors' models to a hospital that has joined.

Everything travels by way of the server, which holds the models, sealed for the newcomer where there are certificates, in memory
while the job runs and writes none of them. The newcomer answers in numbers; its images and its masks stay where they are.
"""

import math
from typing import Any

from feddp import protocol
from feddp.adaptation.models import GLOBAL
from feddp.errors import ContributionError, InputError, PolicyError
from feddp.flare import messages
from feddp.flare.evaluation import is_whole
from feddp.flare.exchange import Exchange, is_sealed, of_peers
from feddp.flare.stage import Answer, no_tensor
from feddp.methods.results import ROUNDED, STD_WITHHELD, WITHHELD
from feddp.training.metrics import METRICS
from feddp.training.store import together

NUMBERS = ("images", "empty_masks", "seconds")
NO_RECIPIENT = "its policy does not name the newcomer among its recipients"
FIT = ("loss_before", "loss", "epoch")  # of the ways that train


class Outside(Exchange):
    """Asks the newcomer whether it consents, the donors for their models, and hands these on.

    Args:
        newcomer: the hospital that adapts the models to its images.
        donors: the sites that are asked for theirs.
        job: the id of the finished job that left them.
    """

    def __init__(self, newcomer: str, donors: list[str], job: str):
        super().__init__()
        self.newcomer, self.donors, self.job = newcomer, donors, job

    def run(self) -> None:
        shared = self.persistor.brought(self.fl_ctx) or {}
        self.persistor.shared_spec.check("the job", shared)
        self._join()
        answers, without = self._collect()
        donors = self.peers_of(self.newcomer, answers)
        message = messages.pack(of_peers(donors, answers) | together({GLOBAL: shared}))
        answer = self.ask(protocol.ADAPT, {self.newcomer: message}, NUMBERS, _check)[self.newcomer]
        self.persistor.write_results(self.fl_ctx, self._results(answer, donors, without))
        self.progress("done")

    def _join(self) -> None:
        """Nothing is asked of a donor, and nothing sent to the newcomer, before that consents."""
        if self.newcomer not in self.sites():
            raise InputError(f"the newcomer {self.newcomer} is not among the job's sites; start its client, and submit again")
        answers = self.introduce(protocol.JOIN, [self.newcomer])
        if not answers[self.newcomer].scalars["consent"]:
            raise PolicyError(
                f"the newcomer {self.newcomer} does not consent: it was sent nothing;"
                " its privacy.json must have 'outside' in `consent`"
            )

    def _collect(self) -> tuple[dict[str, Answer], dict[str, str]]:
        """What the donors answered, with their models, and why those without did not give theirs."""
        spec, here = self.persistor.network_spec, [site for site in self.donors if site in self.sites()]
        answers: dict[str, Answer] = {}
        if here:
            answers = self.collect(
                protocol.GIVE_MODEL, lambda site, answer: spec.check(site, answer.tensors), spec.nbytes, here
            )
        given = self.peers_of(self.newcomer, answers)
        without = dict.fromkeys(self.donors, "not among the job's sites") | dict.fromkeys(
            here, "refused; progress.jsonl says why"
        )
        without |= {site: NO_RECIPIENT if said.scalars["consent"] else "does not consent" for site, said in answers.items()}
        without = {site: reason for site, reason in without.items() if site not in given}
        if not given:
            reasons = "; ".join(f"{site}: {reason}" for site, reason in without.items())
            raise ContributionError(
                f"no donor gave a model ({reasons}); a donor's privacy.json must have 'outside' in `consent`"
            )
        return answers, without

    def _results(self, answer: Answer, donors: list[str], without: dict[str, str]) -> dict[str, Any]:
        names = (*NUMBERS, *FIT, "scores", WITHHELD, STD_WITHHELD)
        said = {name: answer.scalars[name] for name in names if name in answer.scalars}
        who = {"newcomer": self.newcomer, "donors": donors, "without": without}
        real = is_sealed(self.fl_ctx)  # the guards stand, and round, wherever there are certificates
        return {"run": self.job, **who, "sealed": real, ROUNDED: real, **said}


def _check(site: str, answer: Answer) -> None:
    no_tensor(site, answer)
    fit = [answer.scalars[name] for name in FIT if name in answer.scalars]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in fit):
        raise ContributionError(f"site {site}: its losses or its epoch are not finite numbers")
    if "scores" in answer.scalars and not is_whole(answer.scalars["scores"], METRICS, answer.scalars):
        raise ContributionError(f"site {site}: its scores lack a metric, or hold one that is not a finite number")
