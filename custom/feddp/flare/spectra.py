"""Before stage 1, for FedDG: the consenting sites exchange the centres of amplitude spectra, once."""

from feddp.flare import messages
from feddp.flare.exchange import Exchange
from feddp.methods import spectra


class Spectra(Exchange):
    """The server passes them on in memory; what is not exactly amplitudes is refused."""

    def run(self) -> None:
        given = self.collect(messages.COLLECT_SPECTRA, lambda site, answer: spectra.check(self.plan, site, answer.tensors))
        self.persistor.styles = self.hand_out(messages.TAKE_SPECTRA, given, ())
