"""Stage 1 (001, Algorithm 1, lines 3-12): partial-parameter aggregation, then every site keeps v̂_k = γ ∪ ρ_k."""

import time

from torch import Tensor

from feddp import protocol
from feddp.errors import ContributionError
from feddp.flare import messages
from feddp.flare.persistor import BEST
from feddp.flare.stage import Answer, Stage, mean_of
from feddp.methods.aggregation import average
from feddp.plan.resolve import build_method


class PartialAggregation(Stage):
    """T rounds of: send γ^t, receive γ_k, γ^{t+1} = mean γ_k, once in each of a round's phases.

    Then the sites adopt the round that is handed on.
    """

    def run(self) -> None:
        self.hand_over()
        shared = self.persistor.first(self.fl_ctx)
        method = build_method(self.plan)
        self._best_iou = float("-inf")
        for t in range(self.plan.rounds):
            started, slowest = time.monotonic(), 0.0
            for phase in range(self.plan.phases):
                answers = self._train(shared, t, phase)
                if t > 0 and phase == 0:
                    self._note_best(t, mean_of(answers, "iou"))
                mean = average({site: a.tensors for site, a in answers.items()}, self._weights(answers))
                shared = method.aggregate(shared, mean)
                slowest += max(a.scalars["seconds"] for a in answers.values())
            self.persistor.save(shared, t + 1, self.fl_ctx)
            seconds = time.monotonic() - started
            self.progress("round", round=t + 1, of=self.plan.rounds, seconds=seconds, beyond_compute=seconds - slowest)
        start = self.plan.rounds
        if self.plan.start == "last":
            self._note_best(start, mean_of(self._hand_out(protocol.ADOPT, shared, start), "iou"))
        else:
            self._note_best(start, mean_of(self._hand_out(protocol.SCORE, shared, start), "iou"))
            best, start = self.persistor.load(BEST, self.fl_ctx)
            self._hand_out(protocol.ADOPT, best, start)
        self.persistor.start_round = start

    def _train(self, shared: dict[str, Tensor], t: int, phase: int) -> dict[str, Answer]:
        def check(site: str, answer: Answer) -> None:
            _check_round(site, answer, t, phase)
            self.persistor.shared_spec.check(site, answer.tensors)
            if answer.scalars["samples"] < 1:
                raise ContributionError(f"site {site}: its answer says {answer.scalars['samples']} training samples")

        keep = {} if self.persistor.best_round is None else {"keep": self.persistor.best_round}
        numbers = ("loss", "samples", "seconds", *(("dice", "iou") if t and not phase else ()))
        task = messages.pack(shared, round=t, phase=phase, **keep)
        return self.ask(protocol.TRAIN, task, numbers, check, round=t + 1, phase=phase)

    def _hand_out(self, task: str, shared: dict[str, Tensor], round: int) -> dict[str, Answer]:
        def check(site: str, answer: Answer) -> None:
            _check_round(site, answer, round)

        return self.ask(task, messages.pack(shared, round=round), ("dice", "iou"), check, round=round)

    def _weights(self, answers: dict[str, Answer]) -> dict[str, float]:
        by_samples = self.plan.federation.aggregation == "samples"
        return {site: answer.scalars["samples"] if by_samples else 1.0 for site, answer in answers.items()}

    def _note_best(self, round: int, iou: float | None) -> None:
        """`round` is the one saved last; its score comes with the answers to what was sent of it.

        Raises:
            ContributionError: every site withholds its score, and the plan hands on the best round.
        """
        if iou is None:
            if self.plan.start == "best":
                raise ContributionError(
                    "every site withholds its validation IoU, for it has fewer images than its policy's min_images,"
                    " so no round is the best; submit the job with --set start=last"
                )
        elif iou > self._best_iou:
            self._best_iou, self.persistor.best_round = iou, round
            self.persistor.keep_best(self.fl_ctx)


def _check_round(site: str, answer: Answer, round: int, phase: int | None = None) -> None:
    """`phase` is of a training answer; the others have none."""
    said, wanted = (answer.scalars.get("round"), answer.scalars.get("phase")), (round, phase)
    if said != wanted:
        found, here = (f"round {r}" + (f", phase {p}" if phase else "") for r, p in (said, wanted))
        raise ContributionError(f"site {site}: its answer is for {found}, this is {here}")
