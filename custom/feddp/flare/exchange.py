"""What goes from consenting sites to consenting sites by way of the server, which relays it in memory and writes none."""

from collections.abc import Callable, Sequence

from nvflare.apis.shareable import Shareable

from feddp.flare import messages
from feddp.flare.stage import Answer, Stage
from feddp.training.store import together


class Exchange(Stage):
    """A stage that collects tensors from the sites that consent and hands them to each other."""

    def collect(self, task: str, check: Callable[[str, Answer], None], **facts: int) -> dict[str, Answer]:
        """What the consenting sites gave, of those that had something to give. `check` is asked of nobody else's answer."""

        def of_givers(site: str, answer: Answer) -> None:
            if answer.scalars["consent"] or answer.tensors:
                check(site, answer)

        answers = self.ask(task, messages.pack(**facts), ("consent",), of_givers, **facts)
        return {site: answer for site, answer in answers.items() if answer.tensors}

    def hand_out(self, task: str, given: dict[str, Answer], numbers: Sequence[str], **facts: int) -> dict[str, list[str]]:
        """Every site receives what its peers gave; a site that gave nothing receives nothing.

        Returns:
            The peers of every site that answered well, by site.
        """
        peers = {site: sorted(given.keys() - {site}) if site in given else [] for site in self.sites()}
        answers = self.ask(task, {site: _message(peers[site], given, facts) for site in peers}, numbers, **facts)
        return {site: peers[site] for site in answers}


def _message(peers: list[str], given: dict[str, Answer], facts: dict[str, int]) -> Shareable:
    """What one site receives: its peers' tensors, named `<peer>/<tensor>`."""
    return messages.pack(together({peer: given[peer].tensors for peer in peers}), **facts)
