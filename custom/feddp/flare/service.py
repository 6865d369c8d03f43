"""The systemd units that start a server or a site when its machine starts. Provisioning writes them into each kit."""

# what the administrator fills in when copying a unit to where systemd looks (docs/how-to/site-requirements.md)
COMMAND, KIT, USER = "@FEDDP@", "@KIT@", "@USER@"
_NAMES = {"server": "feddp-server", "client": "feddp-site"}  # by kind of kit
# `feddp kit start` ends with 0 only if somebody stopped the participant
_UNIT = """\
[Unit]
Description=FedDP {what} {name}
{wants}StartLimitIntervalSec=0

[Service]
ExecStart="{command}" kit start "{kit}"
{user}UMask=0077
Restart=on-failure
RestartSec=30
TimeoutStopSec=60

[Install]
WantedBy={target}
"""
_WANTS = "Wants=network-online.target\nAfter=network-online.target\n"


def units(kind: str, name: str) -> dict[str, str]:
    """Returns {file name: unit} of a server's or a site's kit: one for the system, one for a user's own services.

    A user's services know no network-online.target; there the participant tries until the network is up.
    """
    stem = _NAMES[kind]
    what = stem.removeprefix("feddp-")
    alike = {"what": what, "name": name, "command": COMMAND, "kit": KIT}
    system = _UNIT.format(**alike, wants=_WANTS, user=f"User={USER}\n", target="multi-user.target")
    own = _UNIT.format(**alike, wants="", user="", target="default.target")
    return {f"{stem}.service": system, f"{stem}.user.service": own}
