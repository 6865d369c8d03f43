"""Tuning without peers after stage 1: local epochs at a reduced learning rate; the best epoch by validation IoU is kept."""

from collections.abc import Sequence

from feddp import protocol
from feddp.data.loading import Sample
from feddp.methods.base import STAGES, TUNE
from feddp.partition import Rule
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import Site
from feddp.training import calibration
from feddp.training.calibration import Report, Tuned
from feddp.training.loop import BatchLoss

NUMBERS = ("loss", "iou_before", "iou", "epoch")  # a site's summary of its local epochs
SLOT = STAGES[TUNE]


def serve(server: Server) -> None:
    server.ask(protocol.TUNE, Message(), NUMBERS)


def answer(task: str, message: Message, host: Host) -> Message:
    return summary(tune(host.open()))


def tune(site: Site, train: Rule = (), report: Report = lambda epoch, loss, score: None) -> Tuned:
    """Trains local epochs at a reduced learning rate, without peers; only the roles `train`, if given."""
    settings = site.plan.tuning
    site.restore(site.latest(before=SLOT))
    with site.only(train):
        return tuned(site, SLOT, settings.tune_epochs, settings.tune_lr, site.batch_loss, site.samples, report)


def tuned(
    site: Site,
    slot: str,
    epochs: int,
    lr: float,
    loss: BatchLoss,
    samples: Sequence[Sample],
    also: Report = lambda epoch, loss, score: None,
) -> Tuned:
    """Trains the network on `samples` for `epochs`; saves the network of the best epoch as the result `slot`."""

    def report(epoch: int, loss: float, score: float) -> None:
        site.store.record(slot, epoch=epoch, of=epochs, loss=loss, iou=score)
        also(epoch, loss, score)

    training, seed = site.plan.training, site.seed(slot)
    done = calibration.tune(site.network, samples, site.validation, loss, training, epochs, lr, seed, site.stopped, report)
    site.save(slot)
    return done


def summary(done: Tuned) -> Message:
    """Returns a site's summary of its local epochs."""
    scores = {"iou_before": done.scores[0], "iou": done.scores[done.best]}
    return Message(scalars={"loss": done.losses[-1], **scores, "epoch": done.best})
