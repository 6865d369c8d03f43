"""The stages at home (001, Algorithm 1, lines 13-16): personal tensors travel once, FedLC's heads at every epoch."""

from feddp import protocol
from feddp.flare import messages
from feddp.flare.exchange import Exchange
from feddp.flare.stage import Answer
from feddp.methods.aggregation import Spec
from feddp.methods.base import CALIBRATE, HEADS, TUNE

TUNED = ("loss", "iou_before", "iou", "epoch")  # what a site says of its epochs at home


class Calibration(Exchange):
    """A tuning without peers where the method has one; then the exchange among consenting sites and the calibration by it."""

    def run(self) -> None:
        plan, persistor = self.plan, self.persistor
        if TUNE in plan.stages:
            self.ask(protocol.TUNE, messages.pack(), TUNED)
        wanted = CALIBRATE in plan.stages and plan.calibration.lambda_ > 0
        if HEADS in plan.stages or wanted:
            self.prepare(protocol.INTRODUCE)
        if HEADS in plan.stages:
            for epoch in range(1, plan.calibration.calibration_epochs + 1):
                heads = self._collect(protocol.COLLECT_HEADS, persistor.head_spec, epoch=epoch)
                self._calibrate(protocol.CALIBRATE_HEADS, heads, epoch=epoch)
        if CALIBRATE in plan.stages:
            personal = self._collect(protocol.COLLECT, persistor.personal_spec) if wanted else {}
            self._calibrate(protocol.CALIBRATE, personal)

    def _collect(self, task: str, spec: Spec, **facts: int) -> dict[str, Answer]:
        """The sites' answers, with personal tensors where they consent; a method with none has nothing to disagree with."""
        return self.collect(task, lambda site, answer: spec.check(site, answer.tensors), spec.nbytes, **facts)

    def _calibrate(self, task: str, personal: dict[str, Answer], **facts: int) -> None:
        """Every site tunes at home with what its peers gave."""
        for site, peers in self.hand_out(task, personal, TUNED, **facts).items():
            # of any stage and epoch that the site took part in
            self.persistor.peers[site] = sorted({*self.persistor.peers.get(site, []), *peers})
