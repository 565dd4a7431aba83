"""Status of the trainer's channel: numbers for the console, and the cause when no data comes."""

from __future__ import annotations

from typing import Any

from common.transport import lease_records
from common.transport.leases import LeaseBook


def stats(book: LeaseBook) -> dict[str, Any]:
    """peers (one dict each), batches by state, and counters since the start (lease_ends: closed
    leases by outcome).
    """
    now = book.clock()
    return {
        "generation": book.gen,
        "window": book.window,
        "target": book.target.value,
        "peers": [
            {
                "name": peer.label,
                "pid": peer.pid,
                "state": peer.state,
                "outstanding": len(peer.leases),
                "capacity": peer.capacity,
                "produced": peer.produced,
                "strikes": peer.strikes,
                "status": peer.status,
                "silent_s": now - peer.last_heard,
            }
            for peer in book.peers.values()
        ],
        "leased": book.in_state(lease_records.LEASED),
        "buffered": book.in_state(lease_records.READY),
        "delivered": book.in_state(lease_records.DELIVERED),
        "released": book.released,
        "buffered_bytes": book.nbytes(),
        "leases": book.counts["lease"],
        "lease_ends": dict(book.outcomes),
        "expired": book.outcomes["expired"],
        "duplicates": book.counts["duplicate"],
        "digest_mismatches": book.counts["digest_mismatch"],
        "bad_digests": book.counts["bad_digest"],
        "garbage": book.counts["garbage"],
        "stale": book.counts["stale"],
        "eagain": book.counts["eagain"],
    }


def why_no_data(book: LeaseBook, endpoint: str, timeout_s: float, last_lost: str) -> str:
    """One line: how many producers there are and in which state, the last one lost, and the batch
    awaited.
    """
    ready = sum(peer.state == "ready" for peer in book.peers.values())
    parts = [
        f"no data for {timeout_s:.0f} s, {ready} producer{'s' * (ready != 1)} connected at"
        f" {endpoint}"
    ]
    if last_lost:
        parts.append(f"last: {last_lost}")
    elif not book.peers:
        parts.append("none has ever connected")
    for peer in book.peers.values():
        state = (
            f"{peer.label} {peer.state}, heard {book.clock() - peer.last_heard:.0f} s ago,"
            f" {len(peer.leases)} leases"
        )
        if peer.gen > book.gen:
            state += (
                f", serves a later trainer (generation {peer.gen}, this one is {book.gen}: an old"
                " copy of the run?)"
            )
        parts.append(f"{state}, {peer.refused or peer.status}".rstrip(", "))
    item = book.head()
    if book.gen == 0:
        parts.append("no generation is open")
    elif item is None or book.all_delivered():
        parts.append(
            f"all {book.target.value} batches that may exist are delivered and none is released"
        )
    else:
        history = [
            f"{verb} {n} times"
            for verb, n in (("expired", item.expired), ("lost with its producer", item.lost))
            if n
        ]
        history += [f"refused by {why}" for _, why in item.nacks]
        history += [f"postponed by {item.postponed}"] if item.postponed else []
        parts.append(
            ", ".join([f"waiting for batch {item.plan} {item.g} ({item.state})", *history])
        )
    return "; ".join(parts)
