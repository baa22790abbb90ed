"""Lines of `sh` that list and end processes in a container. They need nothing but builtins and `/proc`."""

from __future__ import annotations

__all__ = ["COUNT_SERVERS", "END_OTHERS", "END_SINCE", "LIST", "WAIT_FOR_FIRST"]

_STAT = """{ read -r s < /proc/$p/stat; } 2>/dev/null || continue; s=${s##*) }; set -- $s"""
"""Reads a process's state ($1), parent ($2), start ($20) and memory ($21, 0 for dead ones)."""
_ROUNDS = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
LIST = f"""for p in /proc/[0-9]*; do
    p=${{p#/proc/}}
    [ $p != $$ ] || continue
    {_STAT}
    echo "$p:${{20}}"
done"""
"""Prints number and start of every other process: together no process ever has the same."""
COUNT_SERVERS = """{ servers=0; for file in /proc/net/tcp /proc/net/tcp6; do
    while read -r number here there state more; do
        [ "$state" != 0A ] || servers=$((servers + 1))
    done < $file
done; } 2>/dev/null; echo $servers"""
"""Prints how many sockets of TCP listen."""
END_OTHERS = f"""own=" $$ "; p=$$
while [ "$p" -gt 1 ]; do next=0; for p in $p; do {_STAT}; next=$2; own="$own$next "; done; p=$next; done
for round in {_ROUNDS}; do
    found=0
    for p in /proc/[0-9]*; do
        p=${{p#/proc/}}
        case "$own" in *" $p "*) continue;; esac
        {_STAT}
        [ "${{21}}" != 0 ] || continue
        case "$KEPT" in *" $p:${{20}} "*) continue;; esac
        kill -9 "$p" 2>/dev/null && found=1
    done
    [ $found = 1 ] || break
done
[ $found = 0 ]"""
"""Ends all processes but those that `$KEPT` names as `LIST` does, and this shell with what it runs in."""
END_SINCE = f"""for round in {_ROUNDS}; do
    found=0
    for p in /proc/[0-9]*; do
        p=${{p#/proc/}}
        {_STAT}
        case "$2" in 1|$SHELL_PID) ;; *) continue;; esac
        [ "${{20}}" -gt "$SINCE" ] && [ "${{21}}" != 0 ] && kill -9 "$p" 2>/dev/null && found=1
    done
    [ $found = 1 ] || break
done"""
"""Ends what a shell has started after a time: children and orphans, whose own children are orphans then."""
WAIT_FOR_FIRST = f"""n=0
while [ $n -lt 300 ]; do
    for p in /proc/[0-9]*; do
        [ "$(tr '\\0' ' ' 2>/dev/null < $p/cmdline)" != "sleep infinity " ] || break 2
    done
    n=$((n + 1)); sleep 0.1
done
{LIST}"""
"""Waits up to 30 s until an image's entrypoint has come to its command, and lists what runs then. Some never
come to it: they serve in the foreground."""
