"""The last stage: every site evaluates its network on its own test images; the server collects the means."""

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from feddp import protocol
from feddp.data.loading import spacing
from feddp.errors import ContributionError, Stopped
from feddp.files import replacing
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA, STAGES
from feddp.protocol import ROUNDED, STD_WITHHELD, TEST_FLAGS, VOLUMES, WHEN, WITHHELD, Sent
from feddp.reading import is_number
from feddp.sealing.peers import LeftOut, unnoted
from feddp.stages.calibrate import peer_networks
from feddp.stages.empty import of_masks
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.results import gathered
from feddp.stages.scored import best_rounds
from feddp.stages.server import Server
from feddp.stages.site import PEERS, Site
from feddp.training.columns import METRICS, MM, VOLUME_METRICS, columns
from feddp.training.loop import predict
from feddp.training.metrics import Row, foreground, largest_components, measure, millimetres, require_finite_of, summarize
from feddp.training.spectra import SLOT as RECEIVED_SPECTRA
from feddp.training.volumes import measure_in_mm, measure_volumes

NEVER = "took no part in the job: it was not connected when the job began, or refused it, or could not start it"
_EXCHANGES = {HEADS, CALIBRATE}  # the stages that tune a network with peers' tensors
# in the task: the sites whose answer to these stages the server lacks. One may have such a network all the same, if its process
# ended before it answered. The results say that it keeps the one before, so it does
UNTUNED = "untuned"
Rows = dict[str, Row]  # {name of the image or case: metrics}

# --- at the server -------------------------------------------------------------------------------------------------------


def serve(server: Server) -> None:
    """Collects the per-site results, their average, and the matrix site × model of the sites that exchanged with consent."""
    plan, memory = server.plan, server.memory
    untuned = [site for site in server.sites() if site not in memory.peers] if _EXCHANGES & set(plan.stages) else []
    message = Message(scalars={UNTUNED: untuned} if untuned else {})
    answers = server.ask(protocol.EVALUATE, message, (), partial(_check, plan.classes))
    sites = {site: _result(server, site, answer) for site, answer in answers.items()}
    if plan.best_per_site:
        for site, round in best_rounds(memory.events()).items():
            if site in sites:
                sites[site]["round"] = round
    joined = set(server.joined())
    # the approved plan is read back from the sites of the results (`feddp.adaptation.models.plan_of`): none may be left out
    absent = sorted({*plan.sites, *joined} - sites.keys())
    known = memory.unfit | memory.lost
    missing = {site: known.get(site, f"site {site} {'did not evaluate' if site in joined else NEVER}") for site in absent}
    matrix = {site: _row(site, answer) for site, answer in answers.items() if answer.scalars.get("peers")}
    shared, personal = (memory.expected.spec(sent) for sent in (Sent.SHARED, Sent.PERSONAL))
    nbytes = {"shared": (shared.halved if plan.federation.half else shared).nbytes, "personal": personal.nbytes}
    results = gathered(plan, sites, memory.start_round, memory.best_round, missing, matrix, nbytes)
    if {SPECTRA, HEADS, CALIBRATE} & set(plan.stages):
        results["sealed"] = server.sealed  # what the sites exchanged
    if memory.missed:
        results["missed"] = dict(sorted(memory.missed.items()))
    if memory.without:
        results["without"] = memory.without
    results[ROUNDED] = server.sealed  # sites with certificates have a guard, and guards round
    memory.write_results(results)
    server.progress("done")


def _result(server: Server, site: str, answer: Message) -> dict[str, Any]:
    stages, memory = set(server.plan.stages), server.memory
    result = {
        name: answer.scalars[name] for name in (*WHEN, VOLUMES, WITHHELD, STD_WITHHELD, *TEST_FLAGS) if name in answer.scalars
    }
    if SPECTRA in stages:
        result["spectra"] = {"peers": len(memory.styles.get(site, []))}
    if _EXCHANGES & stages:
        sent = memory.peers.get(site, [])
        used = _used(stages, sent, answer)
        # without a peer, the stage only trained with L_seg; a site that failed keeps its earlier network
        result["calibration"] = {"calibrated": bool(used), "peers": len(used), "tuned": site in memory.peers}
        if left_out := [peer for peer in sent if peer not in used]:
            result["calibration"]["left_out"] = left_out
    return result


def _used(stages: set[str], sent: list[str], answer: Message) -> list[str]:
    """Returns the peers, of those `sent` to a site, with which it calibrated its network: it measures the networks of exactly
    these. Where it says nothing of them (its policy withholds it, or heads were exchanged), all count that it was sent."""
    measured = answer.scalars.get("peers")
    return sent if measured is None or HEADS in stages else [peer for peer in sent if peer in measured]


def _row(site: str, answer: Message) -> dict[str, Any]:
    return {**answer.scalars["peers"], site: answer.scalars["before_calibration"]}


def _check(classes: Sequence[str], site: str, answer: Message) -> None:
    peers, whole = answer.scalars.get("peers"), True
    if WITHHELD not in answer.scalars or {*WHEN, "peers"} & answer.scalars.keys():  # the tables come together
        whole = all(is_whole(answer.scalars.get(when), columns(METRICS, classes), answer.scalars) for when in WHEN)
        # of peers, an evaluation by an earlier version has the means over classes alone
        whole &= isinstance(peers, dict) and all(is_whole(summary, METRICS, answer.scalars) for summary in peers.values())
    if VOLUMES in answer.scalars:  # of a site whose images are slices
        volumes = answer.scalars[VOLUMES]
        whole &= isinstance(volumes, dict) and volumes.keys() == set(WHEN)
        wanted = columns(VOLUME_METRICS, classes)
        whole = whole and all(is_whole(summary, wanted, answer.scalars) for summary in volumes.values())
    if not whole:
        raise ContributionError(f"site {site}: its evaluation lacks a metric, or holds one that is not a finite number")


def is_whole(summary: Any, metrics: tuple[str, ...], scalars: Mapping[str, Any]) -> bool:
    """Whether the summary has mean, std and n of every metric as finite numbers (`metrics.summarize`).

    It may lack std where the answer's `scalars` say that std is withheld.
    """
    wanted = {"mean", "n"} if STD_WITHHELD in scalars else {"mean", "std", "n"}
    cells: list[Any] = [summary.get(metric) for metric in metrics] if isinstance(summary, dict) else [None]
    return all(isinstance(cell, dict) and wanted <= cell.keys() <= wanted | {"std"} for cell in cells) and all(
        is_number(value) for cell in cells for value in cell.values()
    )


# --- at a site -----------------------------------------------------------------------------------------------------------


def answer(task: str, message: Message, host: Host) -> Message:
    site = host.open()
    untuned = message.scalars.get(UNTUNED)
    if isinstance(untuned, list) and site.name in untuned:  # a server may send anything
        site.forget([STAGES[stage] for stage in _EXCHANGES])
    return Message(scalars=evaluate(site, partial(host.left_out, task)))


def evaluate(site: Site, left_out: LeftOut = unnoted) -> dict[str, Any]:
    """Test metrics of this site's network before and after its last stage, and of its peers' networks.

    `left_out` is told each peer whose network's maps are not finite; it has no metrics.

    Per-image values are written to `images.csv` and per-case values to `cases.csv`; these files stay at the site, and with them
    the distances in millimetres. Asked again about the same networks, the site returns the same result, which it could not
    measure again without its peers' networks.

    Returns:
        {"before_calibration": summary, "final": summary, "peers": {site: summary}}, each as `metrics.summarize` returns it.
        If there are several classes, the summaries hold those of each class too.
        If the images are slices of volumes, also VOLUMES: {"before_calibration": summary, "final": summary} over the cases.
        TESTS_EMPTY or TESTS_FULL: True, where this is so of all test masks.

    Raises:
        Stopped: the job was aborted.
    """
    final = site.latest()
    if stored := site.evaluated():
        _forget_peers(site)  # the process may have ended before it did
        return stored
    before = (site.slots(before=STAGES[site.plan.stages[-1]]) or [final])[-1]
    measured = {slot: _measure(site, site.store.read(slot)[0]) for slot in dict.fromkeys((before, final))}
    found = _summaries(site, "image", {slot: images for slot, (images, _) in measured.items()}, before, final)
    if site.folder.volumes:
        found[VOLUMES] = _summaries(site, "case", {slot: cases for slot, (_, cases) in measured.items()}, before, final)
    found |= {name: True for name, true in zip(TEST_FLAGS, of_masks(site.test), strict=True) if true}
    found["peers"] = {}
    for peer, state in peer_networks(site).items():
        try:
            found["peers"][peer] = _summary(_measure(site, state, peer)[0])
        except ContributionError as error:  # of this peer alone; unlike a training, the evaluation needs none
            left_out(peer, error)
    site.keep_evaluation(found)
    _forget_peers(site)
    return found


def _forget_peers(site: Site) -> None:
    """Removes what other sites sent: after the evaluation nothing needs it."""
    for received in (PEERS, RECEIVED_SPECTRA):
        site.store.remove(received)


def _summaries(site: Site, what: str, rows: Mapping[str, Rows], before: str, final: str) -> dict[str, Any]:
    """Writes each network's rows to `<what>s.csv` and returns the summaries, which may leave."""
    names = dict.fromkeys(name for values in rows.values() for row in values.values() for name in row)
    with replacing(site.store.folder / f"{what}s.csv") as part, open(part, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, ["network", what, *names])  # a field stays empty where a value is unknown
        writer.writeheader()
        for slot, values in rows.items():
            writer.writerows({"network": slot, what: name, **row} for name, row in values.items())
    return {when: _summary(rows[slot]) for when, slot in zip(WHEN, (before, final), strict=True)}


def _measure(site: Site, state: Mapping[str, Tensor], peer: str = "") -> tuple[Rows, Rows]:
    """Returns the metrics per test image, by file stem, and per case if the images are slices of volumes.

    Those of several classes have each class's values too; those of this site's own networks (no `peer`), where a spacing is
    known, distances in millimetres.

    Raises:
        ContributionError: the network is a peer's, and its maps are not finite.
    """
    site.network.load_state_dict(state)
    classes = site.plan.classes
    rows: list[Row] = []
    maps: list[Tensor] = []
    listed = {row.image: row for row in site.folder.rows}
    where = [listed[sample["stem"]] for sample in site.test]
    spacings = [None if peer else spacing(site.folder, row, site.plan.size) for row in where]
    for predicted, batch in predict(site.network, site.test):
        if site.stopped():
            raise Stopped("the evaluation was stopped: the job was aborted")
        if peer:
            require_finite_of(peer, predicted)
        part = largest_components(predicted) if site.plan.training.largest_component else predicted
        for row, maps_of, truth in zip(measure(part, batch["mask"], classes), part, batch["mask"], strict=True):
            mm = spacings[len(rows)]
            rows.append(row | (millimetres(foreground(maps_of), foreground(truth), mm, classes) if mm else {}))
        if site.folder.volumes:
            maps.append(part.cpu())
    images = dict(zip((row.image for row in where), rows, strict=True))
    if not maps:
        return images, {}
    masks, cases = torch.stack([s["mask"] for s in site.test]), [site.folder.case_of(row) for row in where]
    found = measure_volumes(torch.cat(maps), masks, cases, classes)
    places = [(row.place.slice, mm, row.place.apart) for row, mm in zip(where, spacings, strict=True)]
    distances = measure_in_mm(torch.cat(maps), masks, cases, places, classes)
    return images, {case: row | distances.get(case, {}) for case, row in found.items()}


def _summary(rows: Rows) -> dict[str, dict[str, float]]:
    """Summarizes the metrics that the table of tasks has; distances in millimetres are not among them."""
    kept = [{name: value for name, value in row.items() if not name.split("_")[0].endswith(MM)} for row in rows.values()]
    return summarize(kept)
