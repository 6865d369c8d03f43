"""What goes from consenting sites to consenting sites by way of the server, which relays it in memory and writes none.

Where there are certificates, it relays sealed envelopes (`feddp.sealing`) which it cannot open; in FLARE's simulator, which has
none, the tensors themselves.
"""

from collections.abc import Callable, Mapping, Sequence

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from feddp.errors import ContributionError
from feddp.flare import messages
from feddp.flare.stage import Answer, Stage
from feddp.sealing.envelope import OVERHEAD, recipients_of
from feddp.sealing.introduction import LIMIT
from feddp.sealing.session import INTRODUCTION, SEALED, as_bytes
from feddp.training.store import Tensors, together


def is_sealed(fl_ctx: FLContext) -> bool:
    """Whether sites exchange sealed envelopes: everywhere but where FLARE says that it runs without certificates."""
    return fl_ctx.get_prop(FLContextKey.SECURE_MODE) is not False


class Exchange(Stage):
    """A stage that collects tensors from the sites that consent and hands them to each other."""

    def __init__(self):
        super().__init__()
        self._introductions: Tensors = {}

    def prepare(self, task: str) -> None:
        """Introduces all sites to each other where they have certificates to show; says so where they have none."""
        if is_sealed(self.fl_ctx):
            self.introduce(task)
        else:
            self.log_warning(
                self.fl_ctx, "no certificates: what sites exchange passes the server in the clear", fire_event=False
            )

    def introduce(self, task: str, sites: Sequence[str] | None = None) -> dict[str, Answer]:
        """Asks the sites, all unless they are named, whether they consent; what those show that do is relayed with the
        collections of this stage."""
        sealed = is_sealed(self.fl_ctx)

        def check(site: str, answer: Answer) -> None:
            if sealed and answer.scalars["consent"]:
                as_bytes(site, INTRODUCTION, answer.tensors, LIMIT)
            elif answer.tensors:
                raise ContributionError(f"site {site}: it sent {len(answer.tensors)} tensors where its consent was asked for")

        data = messages.pack() if sites is None else {site: messages.pack() for site in sites}
        answers = self.ask(task, data, ("consent",), check)
        self._introductions = together({site: answer.tensors for site, answer in answers.items()})
        return answers

    def collect(
        self,
        task: str,
        check: Callable[[str, Answer], None],
        nbytes: int,
        sites: Sequence[str] | None = None,
        **facts: int,
    ) -> dict[str, Answer]:
        """What the sites, all unless they are named, gave.

        Args:
            check: of a consenting site's tensors, where they come in the clear.
            nbytes: the most that a site's tensors can be: all that can be said of them where they come sealed.

        Returns:
            Every good answer, those of sites that gave nothing too.
        """

        def sealed(site: str, answer: Answer) -> None:
            if answer.tensors:
                recipients_of(site, as_bytes(site, SEALED, answer.tensors, nbytes + OVERHEAD))

        def clear(site: str, answer: Answer) -> None:
            if answer.scalars["consent"] or answer.tensors:
                check(site, answer)

        message = messages.pack(self._introductions, **facts)
        data = message if sites is None else dict.fromkeys(sites, message)
        return self.ask(task, data, ("consent",), sealed if is_sealed(self.fl_ctx) else clear, **facts)

    def peers_of(self, site: str, answers: Mapping[str, Answer]) -> list[str]:
        """The others whose tensors a site is to receive: all that gave some, or sealed them for it."""
        others = [peer for peer in sorted(answers) if peer != site and answers[peer].tensors]
        if not is_sealed(self.fl_ctx):
            return others
        return [peer for peer in others if site in recipients_of(peer, as_bytes(peer, SEALED, answers[peer].tensors))]

    def hand_out(self, task: str, answers: Mapping[str, Answer], numbers: Sequence[str], **facts: int) -> dict[str, list[str]]:
        """Every site receives what its peers gave; a site that gave nothing receives nothing.

        Returns:
            The peers of every site that answered well, by site.
        """
        gave = {site for site, answer in answers.items() if answer.tensors}
        peers = {site: self.peers_of(site, answers) if site in gave else [] for site in self.sites()}
        parcels = {site: messages.pack(of_peers(peers[site], answers), **facts) for site in peers}
        return {site: peers[site] for site in self.ask(task, parcels, numbers, **facts)}


def of_peers(peers: Sequence[str], answers: Mapping[str, Answer]) -> Tensors:
    """What one site receives: its peers' tensors, named `<peer>/<tensor>`."""
    return together({peer: answers[peer].tensors for peer in peers})
