"""What a hospital decides, from the properties of the job's scope in its own privacy.json."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddp.errors import FedDPError
from feddp.partition import ROLES

CALIBRATION, SPECTRA, OUTSIDE = CONSENTS = ("calibration", "spectra", "outside")
SIMULATED = "FEDDP_SIMULATED"
KEYS = {"data", "device", "consent", "recipients", "private", "threads"}


@dataclass(frozen=True)
class SitePolicy:
    """Where a site's data lie, which device it gives, what it consents to.

    `consent` holds "calibration" if the site gives its personal tensors to the other consenting sites and takes theirs, and
    "spectra" if it does so with the centres of some training images' amplitude spectra (FedDG), and
    "outside" if it gives its finished network to a hospital that joins later, and takes those of others when it is the one; the
    job may then ask it for the mean metrics of its masks (`job-outside --score`).
    `recipients` names the sites that may read what this one gives in any of these; all that the project's root made a
    certificate for where it is left out.
    `private` names roles (feddp.partition) that this hospital never shares, beside those a job's method keeps private.
    """

    data: Path
    device: str = "cpu"
    consent: tuple[str, ...] = ()
    recipients: tuple[str, ...] | None = None
    private: tuple[str, ...] = ()
    threads: int = 1  # CPU threads; one gives the same bits on every machine

    @classmethod
    def of(cls, site: str, properties: Mapping[str, Any] | None, simulated: bool) -> "SitePolicy":
        """A site's policy from its scope's properties.

        FLARE's simulator applies no scopes: there, and only there, the environment variable FEDDP_SIMULATED holds the
        same properties, as JSON {site: properties}.

        Raises:
            FedDPError: there is no policy, or it has a wrong key or value.
        """
        if not properties and simulated:
            properties = json.loads(os.environ.get(SIMULATED, "{}")).get(site)
            if not properties:
                raise FedDPError(f"the simulator has no policy for site {site}; start it with `feddp run`, or set {SIMULATED}")
        if not properties:
            raise FedDPError(
                f"site {site}: its privacy.json has no properties for the job's scope, so nothing says what may leave;"
                " write local/privacy.json with a scope of that name (see the README, 'A hospital's policy')"
            )
        if unknown := sorted(properties.keys() - KEYS):
            raise FedDPError(f"site {site}: privacy.json has unknown properties {unknown}; known: {sorted(KEYS)}")
        if "data" not in properties:
            raise FedDPError(f"site {site}: privacy.json does not say where the data lie; add the property `data`")
        consent = properties.get("consent", [])
        if not isinstance(consent, list) or not set(consent) <= set(CONSENTS):
            raise FedDPError(f"site {site}: privacy.json's consent is {consent!r}; write a list of {', '.join(CONSENTS)}")
        recipients = properties.get("recipients")
        if recipients is not None and not (isinstance(recipients, list) and all(isinstance(name, str) for name in recipients)):
            raise FedDPError(
                f"site {site}: privacy.json's recipients is {recipients!r}; write a list of sites, or leave it out"
            )
        private = properties.get("private", [])
        if not isinstance(private, list) or not set(private) <= set(ROLES):
            raise FedDPError(f"site {site}: privacy.json's private is {private!r}; write a list of {', '.join(ROLES)}")
        threads = properties.get("threads", 1)
        if not isinstance(threads, int) or threads < 1:
            raise FedDPError(f"site {site}: privacy.json's threads is {threads!r}; write a number of CPU threads")
        device = str(properties.get("device", "cpu"))
        allowed = None if recipients is None else tuple(recipients)
        return cls(Path(properties["data"]), device, tuple(consent), allowed, tuple(private), threads)

    def consents(self, word: str) -> bool:
        return word in self.consent
