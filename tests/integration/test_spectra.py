"""FedDG: the interpolation of amplitude spectra by hand, and their exchange before the first round."""

import json
import math
from itertools import combinations

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.fuel.utils import fobs

from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.filters import PrivateTensorGuard
from feddp.flare.site import SiteComponent
from feddp.plan.resolve import build_network
from feddp.reporting.page import write_markdown
from feddp.stages import spectra
from feddp.stages.evaluate import evaluate
from feddp.stages.round import LocalRound
from feddp.stages.train import adopt, train
from feddp.training.spectra import group_means, in_another_style, interpolated, of_patients, radius, received, windows
from feddp.training.store import State
from support.server import SITES, Run, good
from support.site import FlareSite, context


@pytest.fixture
def plan_for(plan_for, pvt):
    """On narrow layers: spectra are of images, whatever the network."""
    return lambda **changes: plan_for(**({"network": pvt} | changes))


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wave(amplitude, cycles=1, shift=0.0):
    """(1, 1, 8, 8), the same in every row: amplitude · cos(2π · cycles · column / 8 − shift)."""
    columns = torch.arange(8)
    return (amplitude * torch.cos(2 * math.pi * cycles * columns / 8 - shift)).expand(1, 1, 8, 8)


# --- the transform --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "b"), [((32, 32), 1), ((199, 500), 1), ((200, 200), 2), ((384, 384), 3), ((384, 256), 2), ((99, 99), 1)]
)
def test_the_centre_is_a_hundredth_of_the_shorter_side_and_at_least_one_pixel(shape, b):
    assert radius(*shape) == b
    assert windows(noise(2, 3, *shape)).shape == (2, 3, 2 * b + 1, 2 * b + 1)


@pytest.mark.parametrize("size", [7, 8])
def test_no_weight_and_the_own_amplitude_change_nothing(size):
    images, other = noise(2, 3, size, size), noise(2, 3, size, size, seed=1)
    torch.testing.assert_close(interpolated(images, windows(other), torch.zeros(2)), images, atol=1e-5, rtol=0)
    torch.testing.assert_close(interpolated(images, windows(images), torch.ones(2)), images, atol=1e-5, rtol=0)
    assert (interpolated(images, windows(other), torch.ones(2)) - images).abs().max() > 0.1


@pytest.mark.parametrize("size", [7, 8])
def test_the_middle_is_the_mean_times_the_pixels(size):
    """|F(0)| = |Σ x| = H · W · |mean|: for a constant 2 on 8 x 8, 128, and 0 beside it."""
    assert windows(torch.full((1, 1, size, size), 2.0))[0, 0].flatten().tolist() == pytest.approx(
        [0, 0, 0, 0, 2 * size * size, 0, 0, 0, 0], abs=1e-4
    )


def test_the_mean_moves_by_the_weight():
    """Constants 2 and 6, λ = 1/4 of the first image, 1 of the second: means 0.75 · 2 + 0.25 · 6 = 3, and 6."""
    found = interpolated(torch.full((2, 1, 8, 8), 2.0), windows(torch.full((2, 1, 8, 8), 6.0)), torch.tensor([0.25, 1.0]))
    torch.testing.assert_close(found[:, 0, 0, 0], torch.tensor([3.0, 6.0]))
    torch.testing.assert_close(found.std(dim=(2, 3)), torch.zeros(2, 1), atol=1e-5, rtol=0)


def test_a_wave_takes_the_peer_s_amplitude_and_keeps_its_phase():
    """cos of one cycle, the peer's 3 sin: λ = 1/2 gives (1 + 3)/2 = 2 cos, at the own place. What the peer has of two
    cycles is outside the centre, and what the image has of them stays as it is."""
    own, peer = wave(1) + wave(1, cycles=2), wave(3, shift=math.pi / 2) + wave(5, cycles=2)
    # 64 pixels, half of a wave's amplitude at each of +1 and −1
    assert windows(peer)[0, 0, 1].tolist() == pytest.approx([96, 0, 96], abs=1e-3)
    found = interpolated(own, windows(peer), torch.tensor([0.5]))
    torch.testing.assert_close(found, wave(2) + wave(1, cycles=2), atol=1e-5, rtol=0)


def test_every_phase_stays():
    images, peers = noise(1, 1, 8, 8), windows(noise(1, 1, 8, 8, seed=1))
    before, after = (torch.fft.fft2(x) for x in (images, interpolated(images, peers, torch.tensor([0.7]))))
    torch.testing.assert_close(after / after.abs(), before / before.abs(), atol=1e-4, rtol=0)
    changed = ~torch.isclose(before.abs(), after.abs(), rtol=1e-4)
    assert {tuple(place) for place in changed[0, 0].nonzero().tolist()} <= {(r, c) for r in (7, 0, 1) for c in (7, 0, 1)}
    assert changed.sum() >= 7


# --- a site -----------------------------------------------------------------------------------------------------------------


def gamma(site):
    return site.partition.split(build_network(site.plan).state_dict())[0]


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("wish", "count"), [(16, 2), (1, 1)])
def test_a_site_gives_means_over_groups_of_its_patients(open_site, wish, count):
    """Eight training images of four patients: two groups of two. Each is the mean of two patients' means, to three digits, and
    none has a patient of another. A job that asks for fewer gets the first of the same groups."""
    site = open_site(method="feddg", spectra=wish)
    given = spectra.given(site, 2)
    assert given.keys() == {"amplitude"}
    assert given["amplitude"].shape == (count, 3, 3, 3)
    images = {}
    for sample in site.samples:
        images.setdefault(sample["patient"], []).append(windows(sample["image"][None])[0])
    means = {patient: torch.stack(own).mean(dim=0) for patient, own in images.items()}
    assert len(means) == 4
    groups = []
    for one in given["amplitude"]:
        pairs = [(a, b) for a, b in combinations(means, 2) if torch.allclose(one, (means[a] + means[b]) / 2, rtol=6e-3)]
        assert len(pairs) == 1
        groups += pairs[0]
    assert len(set(groups)) == 2 * count, "disjoint"
    assert same(given, spectra.given(open_site(method="feddg", spectra=wish, at="again"), 2))
    assert given["amplitude"].equal(spectra.given(open_site(method="feddg", at="all"), 2)["amplitude"][:count])


def test_validation_images_are_in_no_group_even_where_they_are_trained_on(open_site):
    """Otherwise a job that selects on the test images would be given groups with other patients."""
    one, other = (open_site(method="feddg", selection=split, at=split) for split in ("val", "test"))
    assert len(other.samples) > len(one.samples), "the control"
    assert same(spectra.given(one, 2), spectra.given(other, 2))


@pytest.mark.parametrize(("least", "groups"), [(1, 2), (2, 2), (3, 1), (4, 1), (5, 0)])
def test_a_site_with_too_few_patients_for_a_group_gives_none(open_site, least, groups):
    """Of four patients. No policy has a single patient's leave."""
    given = spectra.given(open_site(method="feddg"), least)
    assert len(given.get("amplitude", ())) == groups
    assert bool(given) == bool(groups)


# --- groups -----------------------------------------------------------------------------------------------------------------


def sample(patient, image):
    return {"image": image, "mask": image, "stem": "", "patient": patient}


def test_every_patient_weighs_the_same_and_an_image_counts_once():
    """Constants c on 8 x 8 have a middle of 64 c. A has 1 and 3 (mean 2), B 4 and A's 3 again under its own name, C only what B
    has: A 128, B 256, and C is no patient. The mean of both is 192, not that of the images (64 · 8/3)."""
    flat = {c: torch.full((1, 8, 8), float(c)) for c in (1, 3, 4)}
    had = [("A", 1), ("A", 3), ("B", 3), ("B", 4), ("C", 4)]
    found = of_patients([sample(patient, flat[value]) for patient, value in had])
    assert found[:, 0, 1, 1].tolist() == pytest.approx([128, 256])
    assert group_means(found, 2, [1, 0])[:, 0, 1, 1].tolist() == pytest.approx([192])


def test_groups_have_at_least_so_many_patients_and_leave_none_out():
    """23 patients and at least 5: four groups, of 6, 6, 6 and 5. Patient i has the amplitude 2^i: a sum names its patients."""
    powers = (2.0 ** torch.arange(23)).view(23, 1, 1, 1).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("feddp.training.spectra.DIGITS", 15)
        found = group_means(powers, 5, list(range(23))).double().flatten().tolist()
    sizes = (6, 6, 6, 5)
    sums = [round(mean * size) for mean, size in zip(found, sizes, strict=True)]
    assert [bin(total).count("1") for total in sums] == list(sizes)
    assert sum(sums) == 2**23 - 1


def test_a_mean_leaves_with_three_digits():
    """12.3456 and 12.3464: 12.3460, so 12.3; 1e-5 · 1.23456: 1.23e-5. What was rounded once stays."""
    values = torch.tensor([[12.3456, 1.23456e-5], [12.3464, 1.23456e-5]]).view(2, 2, 1, 1)
    found = group_means(values, 2, [0, 1])
    assert found.flatten().tolist() == pytest.approx([12.3, 1.23e-5], rel=1e-7)
    assert group_means(torch.cat([found, found]), 2, [0, 1]).equal(found)


def auc(members, others):
    """The probability that a member is nearer than a non-member (0.5: no attack; 1: no error)."""
    pairs = [(a < b) + (a == b) / 2 for a in members.tolist() for b in others.tolist()]
    return sum(pairs) / len(pairs)


def nearest(images, given):
    """The attack: of each image, the distance of its spectrum to the nearest one that was given, relative in each number."""
    return torch.stack([((given - own).abs() / given).mean(dim=(1, 2, 3)).min() for own in windows(images)])


def test_who_was_trained_on_is_told_by_single_spectra_and_no_more_by_means():
    """200 patients of one image each, alike in kind, 100 of them drawn for 20 groups of five; the other 100 are strangers.

    Single spectra (as before): a member's distance is 0, a stranger's is not, so the ranks are apart: AUC 1. Means of five: the
    nearest mean is hardly nearer to a member. AUC has a standard deviation of √((100 + 100 + 1) / (12 · 100 · 100)) = 0.041
    if members are as strangers (Mann and Whitney). A member is a fifth of its group's mean, which gives some nearness, so the
    rule leaves room for it: below 0.75, and for a group of 50 below 0.62, three deviations above a half.
    """
    scale = 1 + torch.rand(200, 1, 1, 1, generator=torch.Generator().manual_seed(3))  # brightness and contrast of their own
    images = noise(200, 1, 32, 32, seed=4) * scale + scale
    inside, outside = images[:100], images[100:]
    order = list(range(100))
    single = windows(inside)
    assert nearest(inside, single).max() == 0 < nearest(outside, single).min()
    assert auc(nearest(inside, single), nearest(outside, single)) == 1
    patients = of_patients([sample(str(at), image) for at, image in enumerate(inside)])
    five, fifty = (group_means(patients, least, order) for least in (5, 50))
    assert auc(nearest(inside, five), nearest(outside, five)) < 0.75
    assert auc(nearest(inside, fifty), nearest(outside, fifty)) < 0.5 + 3 * 0.041
    assert nearest(inside, five).min() > 0


def test_a_round_without_spectra_is_fedavg_s_to_the_bit_and_with_them_it_is_not(open_site):
    plain = open_site(method="fedavg", at="fedavg")
    alone = open_site(method="feddg", at="alone")
    spectra.keep(alone, {})
    wanted = train(plain, gamma(plain), 0)[0]
    assert same(train(alone, gamma(alone), 0)[0], wanted)
    spectra.keep(alone, {"site-2": spectra.given(open_site("site-2", method="feddg"), 2)})
    assert not same(train(alone, gamma(alone), 0)[0], wanted)


def test_a_new_process_goes_on_with_what_was_received(open_site):
    """The second round of the process that received, and of one that only finds its files: the same bits."""
    one = open_site(method="feddg")
    spectra.keep(one, {"site-2": spectra.given(open_site("site-2", method="feddg"), 2)})
    mean = train(one, gamma(one), 0)[0]
    wanted = train(one, mean, 1)[0]
    torch.manual_seed(99)
    assert same(train(open_site(method="feddg"), mean, 1)[0], wanted)


def test_what_was_received_is_not_kept_after_the_evaluation(open_site):
    """Like the peers' tensors of the calibration: another hospital's spectra serve the rounds, and are gone with them."""
    site = open_site(method="feddg")
    spectra.keep(site, {"site-2": spectra.given(open_site("site-2", method="feddg"), 2)})
    adopt(site, gamma(site), 0)
    assert received(site.store) is not None
    evaluate(site)
    assert received(site.store) is None
    assert not list(site.store.folder.glob("*spectra*"))


def test_the_loss_is_the_mean_of_both_batches(open_site, monkeypatch):
    """`fit` is given the logits of the images and of the interpolated images; each half counts alike."""
    site = open_site(method="feddg")
    peer = torch.full((1, 3, 3, 3), 50.0)
    spectra.keep(site, {"site-2": {"amplitude": peer}})
    seen = {}
    local = LocalRound(site, State(0), 0, site.plan.training.lr)
    monkeypatch.setattr(local, "fit", lambda **given: seen.update(given) or 0.0)
    monkeypatch.setattr("feddp.training.spectra.in_another_style", lambda images, peers: images * 0 + peers.mean())
    site.method.round(local)
    site.network.eval()
    images, masks = noise(2, 3, 32, 32), (noise(2, 1, 32, 32) > 0).float()
    with torch.no_grad():
        logits = seen["forward"](images)
        torch.testing.assert_close(logits[0], site.network(images))
        torch.testing.assert_close(logits[1], site.network(torch.full_like(images, 50)))
    halves = [site.segmentation_loss(part, masks) for part in logits]
    assert seen["loss"](logits, {"mask": masks}).item() == pytest.approx((halves[0] + halves[1]).item() / 2)
    assert halves[0] != halves[1]


def test_each_image_draws_its_own_peer_and_weight(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "feddp.training.spectra.interpolated", lambda images, peers, weights: given.update(peers=peers, weights=weights)
    )
    peers = torch.arange(5.0).view(5, 1, 1, 1)
    torch.manual_seed(0)
    in_another_style(torch.zeros(200, 1, 8, 8), peers)
    assert given["peers"].unique().tolist() == [0, 1, 2, 3, 4]
    weights = given["weights"]
    assert len(weights.unique()) > 190
    # U(0, 1): mean 1/2, deviation 1/√12 = 0.289; of 200 the mean deviates by 0.02
    assert 0 <= weights.min() < 0.1 < 0.9 < weights.max() < 1
    assert weights.mean().item() == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "amplitude is missing"),
        ({"amplitude": torch.zeros(2, 3, 3, 3), "phase": torch.zeros(2, 3, 3, 3)}, "phase is not expected"),
        ({"amplitude": torch.zeros(2, 3, 32, 32)}, "amplitude is .2, 3, 32, 32."),
        ({"amplitude": torch.zeros(5, 3, 3, 3)}, "expected .4, 3, 3, 3."),
        ({"amplitude": torch.zeros(0, 3, 3, 3)}, "expected .1, 3, 3, 3."),
        ({"amplitude": torch.zeros(2, 3, 3, 3).double()}, "float64"),
        ({"amplitude": torch.full((2, 3, 3, 3), math.nan)}, "not finite"),
        ({"amplitude": [1.0]}, "a list, not a tensor"),
        ({"amplitude": torch.full((2, 3, 3, 3), 1e38)}, "amplitude holds 1e.38, but an amplitude is from 0 to 1034"),
        ({"amplitude": 1000 * windows(noise(2, 3, 32, 32))}, "amplitude holds .*, but an amplitude is from 0 to 1034"),
        ({"amplitude": torch.full((2, 3, 3, 3), -1.0)}, "amplitude holds -1, but"),
    ],
)
def test_what_is_not_exactly_amplitudes_is_refused_by_name(open_site, tensors, message):
    site = open_site(method="feddg", spectra=4)
    with pytest.raises(FedDPError, match=f"site site-2: .*{message}"):
        spectra.keep(site, {"site-2": tensors})
    assert received(site.store) is None
    told, good = {}, torch.ones(2, 3, 3, 3)
    spectra.keep(site, {"site-2": tensors, "site-3": {"amplitude": good}}, told.__setitem__)
    assert [*told] == ["site-2"], "one that is good is enough"
    assert received(site.store).equal(good)


# --- what travels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(plan_for, tiny_root, tmp_path):
    """Asks site-1's executor; returns its answer and the site's component and context."""

    def ask(task, tensors, *consent, least=2):
        messages.register_tensors()
        policy = {"data": tiny_root / "site-1", "consent": list(consent), "min_images": least}
        site = FlareSite(plan_for(method="feddg"), tmp_path, simulated=True, **policy)
        return site.executed(task, tensors), site.open()

    return ask


def test_a_consenting_site_sends_the_windows_and_no_pixel(asked):
    """Names, shapes, values; and on the bytes: every mean window is there (the control), and no image's window or pixel."""
    answer, site = asked("collect_spectra", {}, "spectra")
    tensors, scalars = messages.unpack(answer)
    assert scalars == {"consent": True}
    assert same(tensors, spectra.given(site, 2))
    sent = fobs.dumps(answer)
    assert len(sent) < tensors["amplitude"].nbytes + 2000
    raw = tensors["amplitude"].numpy().tobytes()
    assert all(raw[i : i + 32] in sent for i in range(0, len(raw) - 32, 32))
    for sample in site.samples:
        assert sample["stem"].encode() not in sent
        pixels = sample["image"].numpy().tobytes()
        assert not any(pixels[i : i + 8] in sent for i in range(0, len(pixels), 8))
        assert windows(sample["image"][None]).numpy().tobytes()[:8] not in sent


def test_a_site_with_too_few_patients_gives_nothing_and_says_why(asked, caplog):
    answer, site = asked("collect_spectra", {}, "spectra", least=5)
    tensors, scalars = messages.unpack(answer)
    assert (tensors, scalars) == ({}, {"consent": False, "too_few": True})
    lines = (site.store.folder / "record.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["event"] == "withheld"]
    assert event["message"] == "there are too few patients for a mean spectrum over min_images=5 of them"
    assert "site site-1: collect_spectra gives nothing: there are too few patients" in caplog.text


@pytest.mark.parametrize("consent", [(), ("calibration",)])
def test_a_site_without_this_consent_sends_nothing_and_takes_nothing(asked, consent):
    tensors, scalars = messages.unpack(asked("collect_spectra", {}, *consent)[0])
    assert (tensors, scalars) == ({}, {"consent": False})
    answer, site = asked("take_spectra", {"site-2/amplitude": torch.ones(2, 3, 3, 3)}, *consent)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert received(site.store) is None
    assert "does not consent to the exchange 'spectra'" in (site.store.folder / "record.jsonl").read_text()
    answer, site = asked("take_spectra", {}, *consent)
    assert answer.get_return_code(ReturnCode.OK) == ReturnCode.OK


def test_a_consenting_site_keeps_what_it_is_sent(asked):
    one, two = torch.ones(2, 3, 3, 3), torch.full((1, 3, 3, 3), 2.0)
    _, site = asked("take_spectra", {"b/amplitude": one, "a/amplitude": two}, "spectra")
    assert received(site.store).equal(torch.cat([two, one]))


def test_the_guard_lets_amplitudes_pass_with_consent_and_nothing_larger(plan_for):
    component = SiteComponent(plan_for(method="feddg").to_json())
    message = messages.pack({"amplitude": torch.ones(2, 3, 3, 3)}, consent=True)
    given = context(component, task="collect_spectra", consent=["spectra"])
    assert messages.unpack(PrivateTensorGuard().process(message, given))[0].keys() == {"amplitude"}
    for consent in ([], ["calibration"]):
        with pytest.raises(FedDPError, match="its policy does not consent to the spectra exchange"):
            PrivateTensorGuard().process(message, context(component, task="collect_spectra", consent=consent))
    with pytest.raises(FedDPError, match=r"amplitude is \(2, 3, 32, 32\)"):
        PrivateTensorGuard().process(messages.pack({"amplitude": torch.ones(2, 3, 32, 32)}), given)
    with pytest.raises(FedDPError, match="1 tensors that may not leave"):
        PrivateTensorGuard().process(messages.pack({"phase": torch.ones(2, 3, 3, 3)}), given)
    for task, plan in (("train", component.plan), ("collect_spectra", plan_for(method="fedavg"))):
        other = context(SiteComponent(plan.to_json()), task=task, consent=["spectra"])
        with pytest.raises(FedDPError, match=r"may not leave \(amplitude"):
            PrivateTensorGuard().process(message, other)


# --- the server ---------------------------------------------------------------------------------------------------------------


def giving(consent, received, spoiled=(), few=()):
    """Sites of which those in `consent` give as many amplitudes as their place says, filled with it; the spoiled ones' are
    too large. The `few` have too few patients."""

    def answer(site, task, tensors, scalars):
        if task == "collect_spectra":
            number = SITES.index(site) + 1
            side = 32 if site in spoiled else 3
            given = {"amplitude": torch.full((number, 3, side, side), float(number))} if site in consent else {}
            return messages.pack(given, consent=site in consent, **({"too_few": True} if site in few else {}))
        if task == "take_spectra":
            received[site] = {name: (len(value), value.unique().tolist()) for name, value in tensors.items()}
            return messages.pack(consent=site in consent)
        return good(site, task, tensors, scalars)

    return answer


@pytest.mark.parametrize(
    ("few", "why"), [("", "does not consent"), ("B", "has too few patients for a mean that may leave by its policy")]
)
def test_amplitudes_go_once_to_consenting_sites_and_to_no_other(tmp_path, plan_for, few, why):
    """A gives one, C three; B does not consent or cannot, gives nothing and receives nothing, and the results say why."""
    received = {}
    run = Run(tmp_path, plan_for(method="feddg"), SITES, giving("AC", received, few=few)).run("spectra", "evaluate")
    assert run.panics == []
    assert [task for task, _, _ in run.sent] == ["collect_spectra", *["take_spectra"] * 3, "evaluate"]
    assert received == {"A": {"C/amplitude": (3, [3.0])}, "B": {}, "C": {"A/amplitude": (1, [1.0])}}
    results = json.loads((tmp_path / "results.json").read_text())
    assert {site: part["spectra"]["peers"] for site, part in results["sites"].items()} == {"A": 1, "B": 0, "C": 1}
    assert not any("calibration" in part for part in results["sites"].values())
    assert results["without"] == {"spectra": {"B": why}}
    text = write_markdown(results)
    assert f"B took no part in the exchange for spectra: it {why}." in text
    assert "A: trained with the spectra of 1 peers." in text
    assert "B: trained without others' spectra, as in FedAvg." in text


@pytest.mark.parametrize("factor", [1e38, 1000.0])
def test_amplitudes_that_no_image_has_cost_their_sender_the_exchange_alone(tmp_path, plan_for, factor):
    """At 32 pixels no image has more than 32² = 1024. A and C trained with B's would have losses of 1e32."""
    received = {}
    honest = giving("ABC", received)

    def answer(site, task, tensors, scalars):
        reply = honest(site, task, tensors, scalars)
        if (site, task) != ("B", "collect_spectra"):
            return reply
        given, numbers = messages.unpack(reply)
        return messages.pack({"amplitude": given["amplitude"] * factor}, **numbers)

    run = Run(tmp_path, plan_for(method="feddg"), SITES, answer).run("spectra")
    assert run.panics == []
    (refused,) = run.progress("refused")
    assert refused["site"] == "B"
    assert "but an amplitude is from 0 to 1034" in refused["reason"]
    assert {site: set(names) for site, names in received.items()} == {"A": {"C/amplitude"}, "B": set(), "C": {"A/amplitude"}}


def test_what_is_larger_than_the_centre_is_refused_and_the_others_go_on(tmp_path, plan_for):
    received = {}
    run = Run(tmp_path, plan_for(method="feddg"), SITES, giving("ABC", received, spoiled="B")).run("spectra")
    assert run.panics == []
    (refused,) = run.progress("refused")
    assert "site B: amplitude is (2, 3, 32, 32)" in refused["reason"]
    assert {site: set(names) for site, names in received.items()} == {"A": {"C/amplitude"}, "B": set(), "C": {"A/amplitude"}}
