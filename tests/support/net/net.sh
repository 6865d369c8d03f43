#!/usr/bin/env bash
# A federation's machines as network namespaces of this machine, joined by the links of lossy.c. Root and /dev/net/tun are needed.
#   net.sh up DELAY_MS LOSS RATE_MBIT IDLE_S [SITE...]   a namespace for each site (default a b c d), and the server's
#   net.sh in SITE|server COMMAND...                     runs a command there; server.example.org resolves
#   net.sh signal SITE SIGNAL                            USR1 link down (black hole), USR2 up, WINCH the firewall forgets all
#                                                        flows, HUP counts into link.SITE.log
#   net.sh down
# FED_NET: the folder of its state (default: fed-net in the system's temporary folder). Two nets at a time differ in FED_NET,
# FED_PREFIX (namespaces are PREFIX-SITE, default fed) and FED_SUBNET (default 10.44; a site's link is SUBNET.k.1 and .2).
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=${FED_NET:-${TMPDIR:-/tmp}/fed-net}
prefix=${FED_PREFIX:-fed}
subnet=${FED_SUBNET:-10.44}
case ${1:-} in
up)
    delay=$2 loss=$3 rate=$4 idle=$5
    shift 5
    [ $# -gt 0 ] || set -- a b c d
    mkdir -p "$state"
    printf '%s\n' "$@" > "$state/sites"
    [ -x "$state/lossy" ] || cc -O2 -Wall -o "$state/lossy" "$here/lossy.c"
    ip netns add "$prefix-server"
    ip -n "$prefix-server" link set lo up
    printf '127.0.0.1 localhost server.example.org\n' > "$state/hosts.server"
    k=0
    for site in "$@"; do
        k=$((k + 1))
        ip netns add "$prefix-$site"
        ip -n "$prefix-$site" link set lo up
        "$state/lossy" "$prefix-$site" up0 "$prefix-server" "to_$site" \
            "$delay" "$loss" "$rate" "$idle" "$state/link.$site.log" < /dev/null > "$state/link.$site.err" 2>&1 &
        echo $! > "$state/link.$site.pid"
        for _ in $(seq 50); do
            ip -n "$prefix-server" link show "to_$site" > /dev/null 2>&1 && break
            sleep 0.1
        done
        ip -n "$prefix-$site" addr add "$subnet.$k.2" peer "$subnet.$k.1" dev up0
        ip -n "$prefix-$site" link set up0 up
        ip -n "$prefix-server" addr add "$subnet.$k.1" peer "$subnet.$k.2" dev "to_$site"
        ip -n "$prefix-server" link set "to_$site" up
        printf '127.0.0.1 localhost\n%s.%s.1 server.example.org\n' "$subnet" "$k" > "$state/hosts.$site"
    done ;;
in)
    name=$2
    shift 2
    exec ip netns exec "$prefix-$name" unshare -m \
        bash -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$state/hosts.$name" "$@" ;;
signal)
    kill "-$3" "$(cat "$state/link.$2.pid")" ;;
down)
    [ -f "$state/sites" ] || exit 0
    while read -r site; do
        kill "$(cat "$state/link.$site.pid")" 2> /dev/null || :
        ip netns del "$prefix-$site" 2> /dev/null || :
    done < "$state/sites"
    ip netns del "$prefix-server" 2> /dev/null || :
    rm -rf "$state" ;;
*)
    sed -n '2,9p' "${BASH_SOURCE[0]}"
    exit 2 ;;
esac
