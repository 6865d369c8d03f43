"""A method's exported job in FLARE's simulator, against the plain loop."""

import torch
from safetensors.torch import load_file

from feddp.run import session
from feddp.run.session import Request
from feddp.run.simulator import simulator
from feddp.stages.evaluate import evaluate
from support.driven import drive

SITES = ("site-1", "site-2")


def request_for(root, out, plan, threads=None):
    policies = {site: {"data": str(root / site), "consent": ["calibration", "spectra"]} for site in SITES}
    return Request(plan, policies, out, threads)


def check_same_bits(method, root, plan_for, folder):
    """One round, one epoch in each stage at home: every tensor of both sites' final networks, and every metric of the test.

    The plain loop opens a site anew for each task; a process of FLARE's remembers it. Ditto takes two rounds, so that its
    personal model goes from one to the other, and IGC after them, which exchanges it.
    """
    more = {"rounds": 2, "stages": ("train", "calibrate")} if method == "ditto" else {"rounds": 1}
    plan = plan_for(method=method, start="last", tune_epochs=1, **more)
    results = session.run(request_for(root, folder / "run", plan), simulator, method)
    for name, site in drive(plan, root, folder / "plain", fresh=True).items():
        own = load_file(folder / "run/sites" / name / "network.safetensors")
        slot = site.store.read(site.latest())[0]
        assert own.keys() == slot.keys()
        assert all(torch.equal(own[key], slot[key]) for key in own)
        assert results["sites"][name]["final"] == evaluate(site)["final"]
        assert results["sites"][name].get("spectra") == ({"peers": 1} if method == "feddg" else None)
        calibration = results["sites"][name].get("calibration")
        assert calibration == ({"calibrated": True, "peers": 1, "tuned": True} if method in ("fedlc", "ditto") else None)
