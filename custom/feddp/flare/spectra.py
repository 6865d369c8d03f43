"""Before stage 1, for FedDG: the consenting sites exchange the centres of amplitude spectra, once."""

from feddp import protocol
from feddp.flare.exchange import Exchange
from feddp.methods import spectra


class Spectra(Exchange):
    """The server passes them on in memory; what is not exactly amplitudes is refused, by who receives it where it is sealed."""

    def run(self) -> None:
        self.hand_over()
        self.prepare(protocol.INTRODUCE_SPECTRA)
        limit = spectra.limit(self.plan)
        given = self.collect(
            protocol.COLLECT_SPECTRA, lambda site, answer: spectra.check(self.plan, site, answer.tensors), limit
        )
        self.persistor.styles = self.hand_out(protocol.TAKE_SPECTRA, given, ())
