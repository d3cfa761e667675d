"""Opening an array: who is there, whose content counts, and in which order that is written down.

Order: open and lock every device -> read all superblocks -> one array, each member once, none missing unless
allowed -> which members are outdated (`array_term`) -> empty those -> open every member, with the term that
holds from now on in the superblock that an open writes anyway.

Nothing is written before everything has been read. Cut short anywhere, the next open comes to the same end:
whoever still does not belong to the term is emptied again, whoever belongs to it and was not told is told.

Invariants
  * a member is written the new term only after every outdated member has been emptied;
  * a member that is emptied does not belong to the term that it is told with that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockkv.catalog.admission import Admission
from blockkv.catalog.eviction import Eviction
from blockkv.catalog.wear import WriteBudget
from blockkv.device.base import Device
from blockkv.encryption.secret import Unlock, Unlocker
from blockkv.encryption.volume_key import VolumeKey
from blockkv.errors import BlockKVError, DeviceError, DeviceReadOnly, WrongKey, WrongStore
from blockkv.format.geometry import SLOTS_PER_COPY
from blockkv.format.superblock import Membership, Superblock
from blockkv.logs import logger_for
from blockkv.store.array_store import ArrayStore
from blockkv.store.array_term import Standing, set_of, standing_of
from blockkv.store.create import Target, several
from blockkv.store.data_path import Options
from blockkv.store.discards import DEFAULT_BYTES_PER_S
from blockkv.store.interrupts import interrupts
from blockkv.store.keeping import Policies
from blockkv.store.log import write_superblock
from blockkv.store.member import Member
from blockkv.store.recovery import next_epoch, read_superblock, recover
from blockkv.store.store import (
    Store,
    as_budget,
    check_options,
    open_device,
    open_on,
    open_store,
    refuse_second_open,
)
from blockkv.store.unlocking import unlock_device

__all__ = ["open_any"]

GONE_ERRNOS = frozenset((errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM))
"""What opening the path of a device answers that is not there."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A device of the array, locked, and its superblock."""

    device: Device
    by_path: bool
    superblock: Superblock
    place: Membership
    volume_key: VolumeKey | None


def open_any(
    path: Target | Sequence[Target],
    *,
    degraded: bool = False,
    read_only: bool = False,
    evict: bool = True,
    verify: bool = True,
    engine: Literal["auto", "io_uring", "threads", "passthrough"] = "auto",
    placement: bool = True,
    depth: int = 256,
    commit_interval_ms: float | None = 10.0,
    discard: bool = False,
    max_store_bytes: int = 256 << 20,
    discard_bytes_per_s: float = DEFAULT_BYTES_PER_S,
    eviction: str | Callable[[], Eviction] = "lru",
    admission: str | Callable[[], Admission] = "all",
    quotas: Mapping[str, int] | None = None,
    write_budget: int | str | WriteBudget | None = None,
    unlock: Unlock | None = None,
) -> Store:
    """Open the store on a namespace, partition, loop device, file or `Device`, for this process alone.

    `read_only`: nothing is written, not even a superblock. `evict`: make room by dropping the least recently
    used chunks when full, else raise StoreFull. `verify=False` skips the checksum on gets and is meant for
    measuring only. `engine`: "auto" takes io_uring, or threads where the kernel refuses it; "passthrough"
    sends NVMe commands to a whole namespace, which a path such as /dev/ng0n1 also asks for. `placement`: tell
    a drive that has FDP what does not die together, with that engine (`info()` says how, or why not); False
    for a drive that is better off without. `depth`: requests in flight. `commit_interval_ms`: how soon a put
    without `durable` becomes durable by itself; None leaves it to `commit`. `discard`: tell the device about
    freed space, a second after the delete is durable and later, in large ranges, at most
    `discard_bytes_per_s` and 100 times a second; without a commit interval `discard_freed` alone does it.
    `max_store_bytes`: payload of puts that the device may have at once; more wait, or may be dropped.

    `eviction`: who leaves when it is full, "lru", "prefix" or "s3fifo"; `admission`: what is written at all,
    "all", "twice" or "adaptive"; or a function that makes a policy (`blockkv.catalog.eviction.Eviction`,
    `blockkv.catalog.admission.Admission`). `quotas`: most payload bytes by family, which is what keys begin
    with up to their first slash (`Family.name`); a family above its own loses chunks of its own. Policies
    count anew after every open. `write_budget`: bytes that may be written in a day, metadata included, such
    as "2TiB", shared among the members of an array; chunks that would exceed it are not stored, as those that
    admission refuses (`blockkv.catalog.wear`).

    `unlock`: what opens an encrypted store, as text ("key-file:PATH", "passphrase-file:PATH",
    "keyring:DESCRIPTION", "passphrase": asked for), a secret of at least 32 bytes, or a `Passphrase`. Without
    it the environment variable BLOCKKV_UNLOCK says so, as text.

    Several paths, in any order, open the array that was formatted on them. All members have to be there.
    `degraded` does without those that are missing: left out of the list, or their path leads nowhere. What
    they hold is a miss. Open for writing, it means that they are emptied when they come back. Options count
    for each member.

    Opening costs one read of the checkpoint and of the journal written since, whatever the device's size.

    Raises DeviceBusy (open elsewhere), DeviceReadOnly, DeviceError, NotFormatted, VersionTooNew,
    DeviceTooSmall (the device shrank), WrongStore (the same store is open through another device; members of
    an array are missing, or of several arrays; a member is opened alone for writing), WrongKey (encrypted,
    and `unlock` does not open it; or given, and not encrypted), OccupiedError (for writing: something else
    was made on the device since).
    """
    paths = several(path)
    policies = Policies(eviction, admission, quotas, as_budget(write_budget))
    options = check_options(
        evict, verify, discard, commit_interval_ms, max_store_bytes, discard_bytes_per_s, policies
    )
    if len(paths) == 1 and not degraded:
        return open_store(
            paths[0],
            read_only=read_only,
            evict=evict,
            verify=verify,
            engine=engine,
            placement=placement,
            depth=depth,
            commit_interval_ms=commit_interval_ms,
            discard=discard,
            max_store_bytes=max_store_bytes,
            discard_bytes_per_s=discard_bytes_per_s,
            eviction=eviction,
            admission=admission,
            quotas=quotas,
            write_budget=policies.write_budget,
            unlock=unlock,
        )
    unlocker = Unlocker(unlock)
    array: ArrayStore | None = None
    try:
        with interrupts, contextlib.ExitStack() as stack:
            found: list[_Found] = []
            looked: list[tuple[Device, bool, Superblock]] = []
            for one in paths:
                by_path = not isinstance(one, Device)
                try:
                    device = (
                        one
                        if isinstance(one, Device)
                        else open_device(
                            one, read_only=read_only, engine=engine, placement=placement, depth=depth
                        )
                    )
                except DeviceError as error:
                    if degraded and error.errno in GONE_ERRNOS:
                        logger_for(os.fspath(one)).warning("%s", error)
                        continue
                    raise
                if by_path:
                    stack.callback(device.close)
                looked.append((device, by_path, _look(device, read_only=read_only, by_path=by_path)))
            for device, by_path, superblock in looked:
                try:
                    superblock, key = unlock_device(device, superblock, unlocker, read_only=read_only)
                except WrongKey as error:
                    if not _some_were_away([one for _, _, one in looked]):
                        raise
                    raise WrongKey(
                        f"{error}. The array was written to without some of its members, and key slots may "
                        "have been changed then too: give all of them to `blockkv key-slots add`, what opens "
                        "the others as the secret to add, and with --unlock what opened those"
                    ) from None
                assert superblock.array is not None
                found.append(_Found(device, by_path, superblock, superblock.array, key))
            array = _open_array(found, read_only=read_only, degraded=degraded, options=options)
            stack.pop_all()
            return array
    except BaseException:
        if array is not None:  # an interrupt that waited: nobody would have it
            array.close()
        raise


def _some_were_away(superblocks: Sequence[Superblock]) -> bool:
    """Whether members with key slots are of different terms."""
    encrypted = [one for one in superblocks if one.encryption and not one.encryption.ephemeral]
    return len({one.array.term for one in encrypted if one.array}) > 1


def _look(device: Device, *, read_only: bool, by_path: bool) -> Superblock:
    if device.limits.read_only and not read_only:
        raise DeviceReadOnly(f"{device.path} is read-only; open it with read_only=True")
    if not read_only:
        device.flush()  # what is decided from now on must not rest on what a loss of power takes back
    superblock, _ = read_superblock(device)
    if superblock.array is None:
        raise WrongStore(
            f"{device.path} holds the store {superblock.uuid_text}, no member of an array: open it alone"
        )
    refuse_second_open(device, superblock, read_only=read_only, by_path=by_path)
    return superblock


def _open_array(found: Sequence[_Found], *, read_only: bool, degraded: bool, options: Options) -> ArrayStore:
    missing = _missing(found, degraded=degraded)
    standing = standing_of([one.place for one in found])
    counting = [one for one in found if standing.members >> one.place.member_index & 1]
    outdated = [one for one in found if one not in counting]
    if read_only:
        if not counting:
            raise WrongStore("all members that are there are outdated: others were written to without them")
        return _open_members(counting, None, missing, outdated, options)
    for one in outdated:
        _empty(one, standing)
    return _open_members(found, standing, missing, [], options)


def _missing(found: Sequence[_Found], *, degraded: bool) -> list[int]:
    """The members that are not among `found`. Raises WrongStore unless these belong together."""
    if not found:
        why = "no member of the array is there: none of the paths leads to a device"
        raise DeviceError(why, errno.ENOENT)
    first = found[0]
    for one in found:
        if one.place.array_uuid != first.place.array_uuid:
            raise WrongStore(
                f"{first.device.path} is a member of the array {first.place.array_uuid_text} and "
                f"{one.device.path} of {one.place.array_uuid_text}: open each with its own members"
            )
    counts = Counter(one.place.member_index for one in found)
    for one in found:
        if counts[one.place.member_index] > 1:
            others = [
                other.device.path
                for other in found
                if other.place.member_index == one.place.member_index and other is not one
            ]
            raise WrongStore(
                f"{one.device.path} and {', '.join(others)} are both member {one.place.member_index} of the "
                f"array {one.place.array_uuid_text}: one of them is a copy"
            )
    count = first.place.member_count
    missing = [index for index in range(count) if index not in counts]
    if missing and not degraded:
        there = ", ".join(f"{one.place.member_index} on {one.device.path}" for one in found)
        raise WrongStore(
            f"of the array {first.place.array_uuid_text}, {count} members counted from 0, "
            f"{', '.join(map(str, missing))} missing; there are {there}. Give all of them, or open it "
            "degraded (degraded=True, --degraded): what is missing is a miss then, and where the array is "
            "written to meanwhile it is emptied when it comes back"
        )
    return missing


def _empty(one: _Found, standing: Standing) -> None:
    """Make an outdated member hold nothing. Its new superblocks do not belong to the term they tell.

    They fill all slots, so that no damage to the newest brings back what is outdated.
    """
    recovered = recover(one.device, one.superblock)
    if recovered.read_only_reason:
        raise WrongStore(
            f"{one.device.path} is outdated, because the array was written to without it, and cannot be "
            f"emptied: {recovered.read_only_reason}"
        )
    logger_for(one.device.path, chunks=len(recovered.index)).warning(
        "the array was written to without it; its %d chunks are dropped",
        len(recovered.index),
    )
    superblock = dataclasses.replace(
        next_epoch(recovered),
        checkpoint_page_count=0,
        checkpoint_record_count=0,
        checkpoint_id=os.urandom(16),
        log_sequence=recovered.tail.next_log_sequence - 1,
        replay_from_sequence=recovered.tail.next_sequence,
        replay_predecessor=recovered.tail.predecessor,
        scrub_sequence=0,
        clean=True,
        array=dataclasses.replace(one.place, term=standing.term, term_members=standing.members),
    )
    for _ in range(SLOTS_PER_COPY):
        write_superblock(one.device, superblock)
        superblock = dataclasses.replace(superblock, generation=superblock.generation + 1)


def _open_members(
    found: Sequence[_Found],
    standing: Standing | None,
    missing: Sequence[int],
    outdated: Sequence[_Found],
    options: Options,
) -> ArrayStore:
    """Open them, for writing where `standing` says what the term was, and join them."""
    place: dict[str, Any] = {}
    if standing is not None:
        there = set_of(one.place.member_index for one in found)
        goes_on = there == standing.members and standing.settled and not missing
        place = {"term": standing.term + (not goes_on), "term_members": there}
    count = found[0].place.member_count
    options = dataclasses.replace(options, policies=options.policies.shared(count))
    members: list[Member] = []
    try:
        for one in sorted(found, key=lambda one: one.place.member_index):
            store = open_on(
                one.device,
                standing is None,
                options,
                Unlocker(),
                by_path=one.by_path,
                array=dataclasses.replace(one.place, **place) if place else None,
                volume_key=one.volume_key,
            )
            members.append(Member(one.place.member_index, store))
        where = ",".join(member.path for member in members)
        ambiguous = _held_twice(members)
        if ambiguous:
            logger_for(where, chunks=len(ambiguous)).warning(
                "%d keys are held by two members; they are misses", len(ambiguous)
            )
        if ambiguous and standing is not None:
            for member in members:
                member.drop(ambiguous)
            ambiguous = set()
        if missing:
            logger_for(where).warning("missing from the array: member %s", ", ".join(map(str, missing)))
    except BaseException:
        for member in members:
            with contextlib.suppress(BlockKVError):
                member.store.close()
        raise
    return ArrayStore(
        members,
        missing=missing,
        outdated=[one.place.member_index for one in outdated],
        ambiguous=ambiguous,
    )


def _held_twice(members: Sequence[Member]) -> set[bytes]:
    """Digests of keys that more than one member holds.

    A writer keeps each key in one member, whatever a crash leaves. Damage to metadata, or a flush that was
    acknowledged and not done, may bring a deleted key back beside its successor, and which one that is nobody
    can tell.
    """
    if not any(member.may_be_inexact for member in members):
        return set()
    seen: set[bytes] = set()
    twice: set[bytes] = set()
    for member in members:
        digests = set(member.digests())
        twice |= seen & digests
        seen |= digests
    return twice
