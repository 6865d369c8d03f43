"""The stages at home (001, Algorithm 1, lines 13-16): personal tensors travel once, then every site tunes alone."""

from nvflare.apis.shareable import Shareable

from feddp.flare import messages
from feddp.flare.stage import Answer, Stage
from feddp.methods.base import CALIBRATE, TUNE

TUNED = ("loss", "iou_before", "iou", "epoch")  # what a site says of its epochs at home


class Calibration(Stage):
    """A tuning without peers where the method has one; then the exchange among consenting sites and the calibration."""

    def run(self) -> None:
        if TUNE in self.plan.stages:
            self.ask(messages.TUNE, messages.pack(), TUNED)
        if CALIBRATE in self.plan.stages:
            personal = self._collect() if self.plan.calibration.lambda_ > 0 else {}
            peers = {site: sorted(personal.keys() - {site}) if site in personal else [] for site in self.sites()}
            answers = self.ask(messages.CALIBRATE, {site: _message(peers[site], personal) for site in peers}, TUNED)
            self.persistor.peers = {site: peers[site] for site in answers}

    def _collect(self) -> dict[str, Answer]:
        """The consenting sites' personal tensors; a method with none has nothing to disagree with."""

        def check(site: str, answer: Answer) -> None:
            if answer.scalars["consent"] or answer.tensors:
                self.persistor.personal_spec.check(site, answer.tensors)

        answers = self.ask(messages.COLLECT, messages.pack(), ("consent",), check)
        return {site: answer for site, answer in answers.items() if answer.tensors}


def _message(peers: list[str], personal: dict[str, Answer]) -> Shareable:
    """What one site receives: its peers' personal tensors, named `<peer>/<tensor>`."""
    return messages.pack({f"{p}/{name}": value for p in peers for name, value in personal[p].tensors.items()})
