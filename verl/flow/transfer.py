"""Running a plan: blocks go from rank to rank in buckets, are checked where they landed, and only then may be used.

Every rank of the plan calls `transfer` with its own side of it. Ranks first agree (same plan, one version, newer than what
any receiver holds), then move, then tell each other how it went: either all receivers hold the new version afterwards, or
none may be used until a whole load succeeds. The first fault is what every rank reports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from verl.core.errors import WeightsError
from verl.core.weights import Block, Receipt, block_sums, fold, hash_name
from verl.flow.layout import Box, Piece
from verl.flow.reshard import Bucket, Move, Plan
from verl.flow.transport import Transport, Wait, Wires

DEADLINE_S = 60.0
IN_FLIGHT = 4
_63 = (1 << 63) - 1
Arrays = Mapping[str, torch.Tensor]


class Target:
    """The arrays that one rank fills, the version they hold, and whether they may be used.

    `arrays` is read anew when a load is checked: what counts is what the engine would read. `version`: what the arrays hold
    already (a sampler that has read the same model directory), None for nothing.
    """

    def __init__(self, arrays: Arrays, version: int | None = None):
        self.arrays, self.version = arrays, version
        self._void = "nothing has been loaded into it yet" if version is None else None
        self._sums: dict[tuple[str, Box], int] = {}

    def require(self) -> int:
        """The version in force. Raises WeightsError when the arrays are not one whole version."""
        if self._void:
            raise WeightsError(f"these weights may not be used: {self._void}")
        return self.version

    def begin(self, version: int) -> None:
        """From here on the arrays are in pieces, until `commit`. Raises WeightsError for a version that is not newer."""
        if self.version is not None and version <= self.version:
            raise WeightsError(f"version {version} was sent, but version {self.version} is held already; versions only go up")
        self._void = f"the load of version {version} did not complete; load it, or a newer one, again"

    def commit(self, version: int, sums: dict[tuple[str, Box], int]) -> None:
        """All of `version` has arrived and was checked."""
        self.version, self._void = version, None
        self._sums |= sums

    def stale(self, move: Move, got: int) -> bool:
        """Whether this checksum is the block's from the load before."""
        return self._sums.get((move.tensor, move.box)) == got


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank saw of a transfer. Bytes are payload; checksums (8 bytes a block) and the two rows come on top.

    `receipts`: of every receiver, on every rank: version, number of tensors that came to it, and their checksum, which for a
    receiver of whole tensors is that of `Weights.receipt` over them. Tensors in shared storage count nothing.
    """

    version: int
    receipts: Mapping[int, Receipt]
    sent_bytes: int
    received_bytes: int
    messages: int  # sent by this rank, checksums not counted
    copied_bytes: int  # within this rank
    shared_bytes: int  # needed no copy
    seconds: float


def transfer(plan: Plan, transport: Transport, *, version: int | None = None, arrays: Arrays | None = None,
             target: Target | None = None, deadline_s: float = DEADLINE_S, in_flight: int = IN_FLIGHT) -> Report:
    """Run this rank's side of the plan; every rank of the transport calls it. Returns when all receivers are whole.

    `arrays` (with `version`) on ranks that hold the source, `target` on receivers, both on ranks that are both; ranks that are
    neither only take part in the agreement. `in_flight`: batches of buckets, one bucket a peer each, under way at a time:
    staging memory is at most in_flight * peers * plan.bucket_bytes.

    Raises WeightsError, on every rank and naming the fault, when the ranks disagree, a receiver holds this version or a newer one,
    a bucket does not arrive within `deadline_s`, a rank goes away, or a block that landed is not the one that was sent.
    """
    run = _Run(plan, transport, version, arrays, target, deadline_s)
    run.agree()
    error, receipt = None, None
    try:
        if target is not None:
            target.begin(run.version)
        run.move(in_flight)
        receipt = run.verify()
    except Exception as caught:
        error = caught
    receipts = run.conclude(error, receipt)
    if target is not None:
        target.commit(run.version, run.sums_in)
    return Report(run.version, receipts, run.sent, run.received, run.messages, run.copied, run.shared,
                  time.monotonic() - run.started)


class _Secondary(WeightsError):
    """A connection broke, or another rank failed: the consequence of a fault that somebody else can name better."""


class _Run:
    """One rank's side of one transfer."""

    def __init__(self, plan: Plan, transport: Transport, version: int | None, arrays: Arrays | None, target: Target | None,
                 deadline_s: float):
        self.plan, self.transport, self.version, self.arrays, self.target = plan, transport, version, arrays, target
        self.me, self.deadline_s, self.started = transport.rank, deadline_s, time.monotonic()
        self.outgoing = {d: buckets for (s, d), buckets in plan.buckets.items() if s == self.me}
        self.incoming = {s: buckets for (s, d), buckets in plan.buckets.items() if d == self.me}
        self.local = [m for m in plan.local if m.destination == self.me]
        self.sent = self.received = self.messages = self.copied = self.shared = 0
        self.sums_in: dict[tuple[str, Box], int] = {}  # of the blocks as they landed
        self.claims: list[tuple[Move, str, int]] = []  # what landed, from where, and its checksum at the source
        self._stored: tuple[dict, dict] = tuple(self._by_tensor(layout) for layout in (plan.source, plan.destination))
        self._views: dict[Move, list[torch.Tensor]] = {}  # of moves that land here, as the arrays were at the start

    def _by_tensor(self, layout) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in layout.pieces.get(self.me, ()):
            found.setdefault(piece.tensor, []).append(piece)
        return found

    def left(self) -> float:
        return self.started + self.deadline_s - time.monotonic()

    # -- agreement -----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Compare plan and versions with all ranks; raises the same WeightsError on each of them."""
        rows = self._share({"plan": self.plan.fingerprint, "version": self.version, "why": self._unfit(),
                            "held": self.target.version if self.target is not None else None}, self.left())
        for rank, row in rows.items():
            if row is None:
                raise WeightsError(f"rank {rank} did not come to the transfer of weights within {self.deadline_s:g} s")
            if row["why"]:
                raise WeightsError(f"rank {rank}: {row['why']}")
            if row["plan"] != self.plan.fingerprint:
                raise WeightsError(f"rank {rank} and rank {self.me} hold different plans; plan from the same layouts, versions "
                                   "and bucket size on every rank")
        versions = {row["version"] for row in rows.values()} - {None}
        if len(versions) != 1:
            raise WeightsError(f"one version must be sent, but the ranks say {sorted(versions) or 'none'}")
        self.version, = versions
        for rank in self.plan.destination.pieces:
            held, base = rows[rank]["held"], self.plan.base.get(rank)
            if held is not None and held >= self.version:
                raise WeightsError(f"version {self.version} was sent, but rank {rank} holds version {held} already; versions "
                                   "only go up")
            if base is not None and (held is None or held < base):
                raise WeightsError(f"the plan leaves out what rank {rank} should hold since version {base}, but it holds "
                                   f"{'nothing' if held is None else f'version {held}'}; plan with the versions that are held")

    @torch.no_grad()
    def _unfit(self) -> str | None:
        """Why this rank cannot take part, or None."""
        outside = sorted({*self.plan.ranks} - {*self.transport.ranks})
        if outside:
            return f"the plan speaks of ranks {outside}, the transport reaches {list(self.transport.ranks)}"
        if self._stored[0] and (self.arrays is None or self.version is None):
            return "it holds a part of the source: pass arrays= and version="
        if self._stored[1] and self.target is None:
            return "it is a receiver: pass target="
        try:
            moved = [m for side in (self.outgoing, self.incoming) for buckets in side.values() for b in buckets for m in b.moves]
            for move in (*moved, *self.local):
                if move.source == self.me:
                    self._source(move)
                if move.destination == self.me:
                    self._views[move] = views = self._places(move)
                    dtype = self.plan.destination.table[move.tensor].dtype
                    if wrong := [v.dtype for v in views if v.dtype != dtype]:
                        return f"{move.tensor} is stored as {wrong[0]}, the layout says {dtype}"
        except WeightsError as error:
            return str(error)
        return None

    def _share(self, row: dict, timeout_s: float) -> dict[int, dict | None]:
        try:
            return self.transport.share(row, timeout_s)
        except ConnectionError as error:
            raise _Secondary(str(error)) from error

    # -- movement ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def move(self, in_flight: int) -> None:
        """Send, receive and copy everything; several batches of buckets are under way at a time."""
        batches = max((len(b) for side in (self.outgoing, self.incoming) for b in side.values()), default=0)
        flying: deque[list[tuple[Bucket, int, torch.Tensor | None, Wait]]] = deque()
        for turn in range(batches):
            sends = [(b[turn], peer, self._pack(b[turn])) for peer, b in self.outgoing.items() if turn < len(b)]
            takes = [(b[turn], peer, self._room(b[turn])) for peer, b in self.incoming.items() if turn < len(b)]
            waits = self._post(turn + 1, [(p, t) for _, p, t in sends], [(p, t) for _, p, t in takes])
            flying.append([(bucket, peer, None, wait) for (bucket, peer, _), wait in zip(sends, waits)]
                          + [(bucket, peer, room, wait) for (bucket, peer, room), wait in zip(takes, waits[len(sends):])])
            if len(flying) >= in_flight:
                self._settle(flying.popleft())
        self._copy_local()
        sums = self._exchange_sums()
        while flying:
            self._settle(flying.popleft())
        for peer, message, buckets, wait in sums:
            self._await(wait, "checksums", peer, taking=buckets is not None)
            named = [(m, f"bucket {b.index + 1} of {b.count} from rank {peer}") for b in buckets or () for m in b.moves]
            self.claims += [(m, where, claim) for (m, where), claim in zip(named, message.view(torch.int64).tolist())]
        if self.received != self.plan.lacking.get(self.me, 0) or self.sent != self.plan.sent.get(self.me, 0):
            raise WeightsError(f"rank {self.me} sent {self.sent} and received {self.received} bytes, the plan says "
                               f"{self.plan.sent.get(self.me, 0)} and {self.plan.lacking.get(self.me, 0)}")

    def _post(self, tag: int, sends: list, takes: list) -> list[Wait]:
        try:
            return self.transport.post(tag, sends, takes)
        except ConnectionError as error:
            peers = sorted({peer for peer, _ in sends + takes})
            raise _Secondary(f"version {self.version}: a connection to one of the ranks {peers} is gone ({error})") from error

    def _source(self, move: Move) -> torch.Tensor:
        piece = next(p for p in self._stored[0][move.tensor] if p.box.contains(move.box))
        return piece.view(self.arrays, move.box)

    def _places(self, move: Move) -> list[torch.Tensor]:
        """Every place where this rank stores the block, as the arrays are now."""
        return [p.view(self.target.arrays, move.box) for p in self._stored[1][move.tensor] if p.box.contains(move.box)]

    def _block(self, move: Move, storage: torch.Tensor) -> Block:
        spec = self.plan.destination.table[move.tensor]
        return storage.to(spec.dtype), move.box.start, spec.shape

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's message: a view of the storage when it is one contiguous block, else a flattened copy."""
        blocks = [self._source(m).to(bucket.dtype) for m in bucket.moves]
        first = blocks[0]
        if len(blocks) == 1 and first.is_contiguous() and first.device == self.transport.device:
            return first.reshape(-1).view(torch.uint8)
        flat = torch.empty(sum(b.numel() for b in blocks), dtype=bucket.dtype, device=self.transport.device)
        for part, block in zip(flat.split([b.numel() for b in blocks]), blocks):
            part.view(block.shape).copy_(block)
        return flat.view(torch.uint8)

    def _room(self, bucket: Bucket) -> torch.Tensor:
        """Where the bucket's message arrives: its place itself when that is one contiguous block."""
        places = self._views[bucket.moves[0]]
        if len(bucket.moves) == len(places) == 1 and places[0].is_contiguous() and places[0].device == self.transport.device:
            return places[0].reshape(-1).view(torch.uint8)
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.transport.device)

    def _await(self, wait: Wait, what: str, peer: int, taking: bool) -> None:
        name = f"version {self.version}: {what} {'from' if taking else 'to'} rank {peer}"
        try:
            wait(self.left())
        except TimeoutError as error:  # a receiver that does not take its bucket has a better reason to give
            raise (WeightsError if taking else _Secondary)(
                f"{name} did not get through to rank {self.me if taking else peer} within {self.deadline_s:g} s; the load is void"
            ) from error
        except ConnectionError as error:
            raise _Secondary(f"{name}: rank {peer} went away ({error}); the load is void") from error

    def _settle(self, batch: list[tuple[Bucket, int, torch.Tensor | None, Wait]]) -> None:
        for bucket, peer, room, wait in batch:
            what = f"bucket {bucket.index + 1} of {bucket.count} ({bucket.moves[0].tensor} and what follows)"
            self._await(wait, what, peer, taking=room is not None)
            if room is None:
                self.sent += bucket.nbytes
                self.messages += 1
            else:
                self.received += room.numel()
                self._land(bucket, room)

    def _land(self, bucket: Bucket, room: torch.Tensor) -> None:
        blocks = room.view(bucket.dtype).split([m.box.size for m in bucket.moves])
        for move, block in zip(bucket.moves, blocks):
            for place in self._views[move]:
                if place.data_ptr() != block.data_ptr():
                    place.copy_(block.view(move.box.shape))

    def _copy_local(self) -> None:
        """Blocks this rank has already: from its source storage to its target, unless the two are one."""
        copied = []
        for move in self.local:
            block = self._source(move)
            apart = [place for place in self._views[move] if not _same_storage(place, block)]
            for place in apart:
                place.copy_(block)
            if apart:
                copied.append((move, self._block(move, block)))
                self.copied += move.nbytes
            else:
                self.shared += move.nbytes
        sums = block_sums([block for _, block in copied]).tolist() if copied else []
        self.claims += [(move, "this rank's own storage", claim) for (move, _), claim in zip(copied, sums)]

    def _exchange_sums(self) -> list[tuple[int, torch.Tensor, tuple[Bucket, ...] | None, Wait]]:
        """Post the checksums of all blocks: (peer, message, buckets they belong to or None when they are sent, wait)."""
        leaving = {peer: [m for b in buckets for m in b.moves] for peer, buckets in self.outgoing.items()}
        unlike = {(m.tensor, m.box): m for moves in leaving.values() for m in moves}  # receivers of one block share its checksum
        sums = block_sums([self._block(m, self._source(m)) for m in unlike.values()]).to(self.transport.device) if unlike else None
        row = {key: i for i, key in enumerate(unlike)}
        sends = [(peer, sums[[row[m.tensor, m.box] for m in moves]].view(torch.uint8)) for peer, moves in leaving.items()]
        rooms = [(peer, torch.empty(8 * sum(len(b.moves) for b in buckets), dtype=torch.uint8, device=self.transport.device))
                 for peer, buckets in self.incoming.items()]
        waits = self._post(0, sends, rooms)
        return [(peer, message, self.incoming[peer] if i >= len(sends) else None, wait)
                for i, ((peer, message), wait) in enumerate(zip(sends + rooms, waits))]

    # -- what landed ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def verify(self) -> Receipt | None:
        """Compare every block, where the receiver would read it, with its source; None on ranks that receive nothing."""
        if self.target is None:
            return None
        landed = [(m, where, claim, place) for m, where, claim in self.claims for place in self._places(m)]
        sums = block_sums([self._block(m, place) for m, _, _, place in landed]).tolist() if landed else []
        wrong = [(row, got) for row, got in zip(landed, sums) if row[2] != got]
        if wrong:
            (move, where, claim, place), got = wrong[0]
            raise WeightsError(f"version {self.version}: {move.tensor} {move.box.start} to {move.box.stop} at rank {self.me}, "
                               f"{where}: {self._diagnose(move, claim, place, got)}; {len(wrong)} of {len(sums)} blocks are "
                               "wrong and the load is void")
        totals: dict[str, int] = {}
        for move, _, claim in self.claims:
            totals[move.tensor] = totals.get(move.tensor, 0) + claim
            self.sums_in[move.tensor, move.box] = claim
        table = self.plan.destination.table
        checksum = sum(fold(total, table[name].shape) ^ (hash_name(name) & _63) for name, total in totals.items())
        return Receipt(self.version, len(totals), checksum & _63)

    def _diagnose(self, move: Move, claim: int, place: torch.Tensor, got: int) -> str:
        if self.target.stale(move, got):
            return f"it is still that of version {self.target.version}: a stale copy was sent or kept"
        if place.dim() == 2 and block_sums([self._block(move, place.reshape(*place.shape[::-1]).t())]).item() == claim:
            return "it is transposed"
        return "its bytes are not those that were sent"

    def conclude(self, error: Exception | None, receipt: Receipt | None) -> dict[int, Receipt]:
        """Tell all ranks how it went; returns the receipts of all receivers, or raises the fault on every rank."""
        row = {"why": None if error is None else str(error) or repr(error), "secondary": isinstance(error, _Secondary),
               "receipt": None if receipt is None else [receipt.version, receipt.count, receipt.checksum]}
        rows = None
        try:
            rows = self._share(row, max(self.left(), 0) + self.transport.grace_s)
        except _Secondary as unheard:
            error = error or unheard
        if error is not None and (rows is None or not row["secondary"]):
            raise error
        failed = [(other is not None and other["secondary"], rank, other["why"] if other else "did not report in time; it "
                   "died or hangs") for rank, other in rows.items() if other is None or other["why"]]
        if failed:
            _, rank, why = min(failed)
            raise _Secondary(f"version {self.version} is void on every receiver: rank {rank} {why}") from error
        return {rank: Receipt(*other["receipt"]) for rank, other in rows.items() if other["receipt"]}


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.stride(), a.dtype, a.device) == (b.data_ptr(), b.stride(), b.dtype, b.device)


def transfer_in_process(plan: Plan, version: int, arrays: Mapping[int, Arrays], targets: Mapping[int, Target],
                        deadline_s: float = DEADLINE_S, wires: Wires | None = None) -> dict[int, Report]:
    """The same between ranks that all live in this process, a thread each; rank -> its report.

    Blocks of a rank that is on both sides, in storage that is one, are not copied. Raises the WeightsError of the rank that
    saw the fault itself.
    """
    wires = wires if wires is not None else Wires(plan.ranks)

    def one(rank: int) -> Report:
        held = arrays.get(rank)
        return transfer(plan, wires.transport(rank), version=None if held is None else version, arrays=held,
                        target=targets.get(rank), deadline_s=deadline_s)

    with ThreadPoolExecutor(len(plan.ranks), thread_name_prefix="transfer") as threads:
        futures = {rank: threads.submit(one, rank) for rank in plan.ranks}
    errors = [e for e in (f.exception() for f in futures.values()) if e is not None]
    if errors:
        raise min(errors, key=lambda e: isinstance(e, _Secondary))
    return {rank: future.result() for rank, future in futures.items()}
