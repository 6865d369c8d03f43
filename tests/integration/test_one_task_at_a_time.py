"""FLARE runs a task that the server pushes (by an aux topic) beside the one that was fetched. A site does one at a time."""

import threading

import torch

from feddp import protocol
from feddp.flare import messages


def test_a_second_task_does_not_change_what_the_first_one_sends(hospital):
    """Ditto's personal model has the shared tensors' names. Scoring loads it into the site's one network: were that done
    between a round's training and its answer, the answer would be the personal model, and no guard could tell."""
    site = hospital("ditto")

    def trained(round, shared):
        return messages.unpack(site.executed(protocol.TRAIN, shared, round=round, phase=0))[0]

    shared = trained(0, site.shared)
    alone = trained(1, shared)
    personal = site.store.load_state(2).personal
    assert not torch.equal(alone["q.weight"], personal["q.weight"]), "the control: there is something to take"

    method, codes = site.open().method, []
    original = method.round

    def score():
        codes.append(site.executed(protocol.SCORE, shared, round=2).get_return_code(""))

    def interrupted(opened):
        loss = original(opened)
        other.start()
        other.join(1)
        return loss

    other = threading.Thread(target=score)
    method.round = interrupted
    sent = trained(1, shared)
    other.join()
    assert codes == [""], "it was done, afterwards"
    assert not torch.equal(sent["q.weight"], personal["q.weight"])
    assert all(torch.equal(sent[name], alone[name]) for name in alone)
