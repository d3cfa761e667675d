"""The simulated device: what it keeps, what it loses, and that every fault does what its name says."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from array import array

import pytest
import xxhash

from blockkv.device.base import UNIT_BYTES, Batch, Direction, Priority
from blockkv.device.simulated import (
    Crash,
    Fault,
    FaultKind,
    FaultPlan,
    OperationKind,
    SimulatedDevice,
    mixtures,
)
from blockkv.errors import (
    DeviceError,
    DeviceLost,
    DeviceReadOnly,
    DeviceTooSmall,
    InvalidArgument,
    StoreClosed,
)

MIB = 1 << 20


def unit(byte: int) -> bytes:
    return bytes([byte]) * UNIT_BYTES


def memory(length_bytes: int, fill: bytes | None = None) -> array[int]:
    return array("B", fill if fill is not None else bytes(length_bytes))


def write_batch(payload: bytes, extents: list[tuple[int, int]], leaf_bytes: int = 0) -> Batch:
    batch = Batch(Direction.WRITE, Priority.STORE)
    source = array("B", payload)
    batch.keepalive.append(source)
    batch.add(len(payload), extents, [(source.buffer_info()[0], len(payload))], leaf_bytes)
    return batch


def read_batch(target: array[int], extents: list[tuple[int, int]], leaf_bytes: int = 0) -> Batch:
    batch = Batch(Direction.READ, Priority.LOAD)
    batch.keepalive.append(target)
    batch.add(len(target), extents, [(target.buffer_info()[0], len(target))], leaf_bytes)
    return batch


def outcomes(device: SimulatedDevice, offset_bytes: int, length_bytes: int, count: int = 400) -> set[bytes]:
    rng = random.Random(1)
    return {device.crash_clone(rng).peek(offset_bytes, length_bytes) for _ in range(count)}


# --- transfers ---


def test_unwritten_space_reads_as_zeros() -> None:
    device = SimulatedDevice(4 * MIB)
    assert device.read(MIB, 2 * UNIT_BYTES) == bytes(2 * UNIT_BYTES)
    assert device.written_units() == []


def test_scatter_gather_round_trip_with_leaves_and_padding() -> None:
    device = SimulatedDevice(4 * MIB)
    payload = random.Random(3).randbytes(3 * UNIT_BYTES + 100)
    device.write(5 * UNIT_BYTES, unit(0xEE) * 2)  # old content where the padding will be
    extents = [(5 * UNIT_BYTES, UNIT_BYTES), (9 * UNIT_BYTES, UNIT_BYTES), (6 * UNIT_BYTES, 2 * UNIT_BYTES)]
    first, second = array("B", payload[:777]), array("B", payload[777:])
    batch = Batch(Direction.WRITE, Priority.STORE)
    batch.add(len(payload), extents, [(a.buffer_info()[0], len(a)) for a in (first, second)], 8192)
    device.submit(batch)
    device.wait(batch)
    assert batch.result(0) == 0
    expected = b"".join(
        xxhash.xxh3_64_intdigest(payload[start : start + 8192]).to_bytes(8, "little")
        for start in range(0, len(payload), 8192)
    )
    assert batch.leaves(0) == expected
    assert device.peek(9 * UNIT_BYTES, UNIT_BYTES) == payload[UNIT_BYTES : 2 * UNIT_BYTES]
    tail = device.peek(7 * UNIT_BYTES, UNIT_BYTES)
    assert tail == payload[3 * UNIT_BYTES :] + bytes(UNIT_BYTES - 100)

    head, middle, rest = memory(1), memory(4096), memory(len(payload) - 4097)
    back = Batch(Direction.READ, Priority.LOAD)
    back.add(len(payload), extents, [(a.buffer_info()[0], len(a)) for a in (head, middle, rest)], 8192)
    device.submit(back)
    device.wait(back)
    assert back.result(0) == 0
    assert head.tobytes() + middle.tobytes() + rest.tobytes() == payload
    assert back.leaves(0) == expected


def test_empty_payload_has_no_requests() -> None:
    device = SimulatedDevice(MIB)
    batch = Batch(Direction.WRITE, Priority.STORE)
    batch.add(0, [], [], 131072)
    device.submit(batch)
    device.wait(batch)
    assert batch.result(0) == 0
    assert batch.leaves(0) == b""
    assert device.operation_count == 0


@pytest.mark.parametrize(
    ("payload_bytes", "extents", "segment_bytes"),
    [
        (4096, [(0, 8192)], 4096),
        (4096, [(0, 4096)], 4095),
        (8192, [(512, 8192)], 8192),
        (5000, [(0, 4096)], 5000),
        (4096, [(0, 2048), (4096, 2048)], 4096),
    ],
)
def test_malformed_transfers_are_refused(
    payload_bytes: int, extents: list[tuple[int, int]], segment_bytes: int
) -> None:
    device = SimulatedDevice(MIB)
    source = memory(16384)
    batch = Batch(Direction.WRITE, Priority.STORE)
    batch.add(payload_bytes, extents, [(source.buffer_info()[0], segment_bytes)])
    with pytest.raises(InvalidArgument):
        device.submit(batch)


def test_beyond_the_end_fails_with_the_kernels_codes() -> None:
    device = SimulatedDevice(MIB)
    with pytest.raises(DeviceError) as caught:
        device.write(MIB, unit(1))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(DeviceError) as caught:
        device.read(MIB - UNIT_BYTES, 2 * UNIT_BYTES)
    assert caught.value.errno == errno.EIO


def test_a_failed_transfer_leaves_its_neighbours_alone() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan.fail(1, errno.ENODATA))
    batch = Batch(Direction.WRITE, Priority.STORE)
    source = memory(0, unit(7))
    for offset_bytes in (0, 8192, 16384):
        batch.add(UNIT_BYTES, [(offset_bytes, UNIT_BYTES)], [(source.buffer_info()[0], UNIT_BYTES)])
    device.submit(batch)
    device.wait(batch)
    assert [batch.result(position) for position in range(3)] == [0, -errno.ENODATA, 0]
    assert device.peek(16384, UNIT_BYTES) == unit(7)


def test_read_only_device_refuses_writes() -> None:
    device = SimulatedDevice(MIB, read_only=True)
    with pytest.raises(DeviceReadOnly):
        device.write(0, unit(1))
    with pytest.raises(DeviceError) as caught:
        device.discard(0, UNIT_BYTES)
    assert caught.value.errno == errno.EROFS
    assert device.read(0, UNIT_BYTES) == unit(0)


def test_arguments_are_checked() -> None:
    for arguments in ({"size_bytes": 1000}, {"size_bytes": 0}):
        with pytest.raises(InvalidArgument):
            SimulatedDevice(**arguments)
    for options in ({"lba_bytes": 520}, {"tear_bytes": 100}, {"discard_granularity_bytes": 512}):
        with pytest.raises(InvalidArgument):
            SimulatedDevice(MIB, **options)
    with pytest.raises(DeviceTooSmall):
        SimulatedDevice(MIB).poke(MIB, b"x")


def test_registered_ranges_are_tracked() -> None:
    device = SimulatedDevice(MIB)
    handle = device.register(4096, 4096)
    device.unregister(handle)
    device.unregister(-1)
    with pytest.raises(InvalidArgument):
        device.unregister(handle)


def test_closed_device_refuses_work() -> None:
    device = SimulatedDevice(MIB)
    device.close()
    device.close()
    for operation in (
        device.flush,
        lambda: device.read(0, UNIT_BYTES),
        lambda: device.discard(0, UNIT_BYTES),
    ):
        with pytest.raises(StoreClosed):
            operation()


# --- durability ---


def test_flushed_writes_survive_and_unflushed_ones_may_not() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(1))
    device.flush()
    assert outcomes(device, 0, UNIT_BYTES) == {unit(1)}
    device.write(0, unit(2))
    seen = outcomes(device, 0, UNIT_BYTES)
    assert {unit(1), unit(2)} < seen
    assert all(set(page) <= {1, 2} for page in seen)


def test_any_intermediate_version_can_survive_per_sector() -> None:
    device = SimulatedDevice(MIB)
    for value in (1, 2, 3):
        device.write(0, unit(value))
    seen = outcomes(device, 0, UNIT_BYTES, 2000)
    for sector in range(8):
        assert {page[sector * 512] for page in seen} == {0, 1, 2, 3}
    assert all(len(set(page[start : start + 512])) == 1 for page in seen for start in range(0, 4096, 512))


def test_tear_unit_of_a_whole_page_never_tears() -> None:
    device = SimulatedDevice(MIB, tear_bytes=4096)
    device.write(0, unit(1))
    assert outcomes(device, 0, UNIT_BYTES) == {unit(0), unit(1)}


def test_later_writes_can_survive_without_earlier_ones() -> None:
    device = SimulatedDevice(MIB)
    for index in range(3):
        device.write(index * UNIT_BYTES, unit(index + 1))
    rng = random.Random(5)
    seen = set()
    for _ in range(1000):
        clone = device.crash_clone(rng)
        seen.add(tuple(clone.peek(index * UNIT_BYTES, UNIT_BYTES) == unit(index + 1) for index in range(3)))
    assert seen == set(itertools.product((False, True), repeat=3))


def test_without_a_volatile_cache_completed_writes_are_durable() -> None:
    device = SimulatedDevice(MIB, volatile_write_cache=False)
    device.write(0, unit(1))
    assert outcomes(device, 0, UNIT_BYTES) == {unit(1)}
    assert not device.limits.volatile_write_cache


def test_process_kill_keeps_completed_writes_in_the_cache() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(1))
    killed = device.crash_clone(random.Random(1), Crash.PROCESS_KILL)
    assert killed.read(0, UNIT_BYTES) == unit(1)
    assert unit(0) in outcomes(killed, 0, UNIT_BYTES), "a kill does not flush"
    killed.flush()
    assert outcomes(killed, 0, UNIT_BYTES) == {unit(1)}


def test_crash_clones_are_independent_and_leave_the_device_alone() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(1))
    device.flush()
    device.write(0, unit(2))
    clone = device.crash_clone(random.Random(0))
    clone.write(4096, unit(9))
    clone.flush()
    assert device.read(0, UNIT_BYTES) == unit(2)
    assert device.read(4096, UNIT_BYTES) == unit(0)
    device.write(0, unit(3))
    assert clone.peek(0, 1) in (b"\x01", b"\x02")


def test_the_seed_fixes_the_crash() -> None:
    def images(seed: int) -> list[bytes]:
        device = SimulatedDevice(MIB)
        for index in range(20):
            device.write(index * UNIT_BYTES, unit(index + 1))
        rng = random.Random(seed)
        return [device.crash_clone(rng).peek(0, 20 * UNIT_BYTES) for _ in range(10)]

    assert images(1) == images(1)
    assert images(1) != images(2)


def test_garbage_sectors_appear_only_when_asked_for() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(1))
    rng = random.Random(2)
    pages = [device.crash_clone(rng, garbage=0.3).peek(0, UNIT_BYTES) for _ in range(200)]
    assert any(set(page) - {0, 1} for page in pages)
    assert all(set(page) <= {0, 1} for page in outcomes(device, 0, UNIT_BYTES))


def test_clone_is_exact_and_durable() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(1))
    copy = device.clone()
    assert outcomes(copy, 0, UNIT_BYTES, 50) == {unit(1)}


def test_discard_may_take_effect_before_any_flush_and_may_not() -> None:
    seen = set()
    for seed in range(30):
        device = SimulatedDevice(MIB, seed=seed)
        device.write(0, unit(1))
        device.flush()
        device.discard(0, UNIT_BYTES)
        seen |= outcomes(device, 0, UNIT_BYTES, 40)
    assert {unit(0), unit(1)} <= seen
    assert any(set(page) - {0, 1} for page in seen), "garbage is allowed too"


def test_discard_touches_whole_granules_only_and_nothing_where_unsupported() -> None:
    device = SimulatedDevice(MIB, discard_granularity_bytes=16384)
    for index in range(12):
        device.write(index * UNIT_BYTES, unit(1))
    for _ in range(20):
        device.discard(4096, 11 * UNIT_BYTES)
    assert device.peek(4096, 12288) == unit(1) * 3
    assert device.peek(16384, 8 * UNIT_BYTES) != unit(1) * 8
    plain = SimulatedDevice(MIB, discard_granularity_bytes=0)
    plain.write(0, unit(1))
    plain.discard(0, UNIT_BYTES)
    assert plain.peek(0, UNIT_BYTES) == unit(1)
    assert plain.counters()["device_discard_count"] == 0


# --- completion modes ---


def test_inline_on_done_runs_before_submit_returns() -> None:
    device = SimulatedDevice(MIB)
    batch = write_batch(unit(1), [(0, UNIT_BYTES)])
    seen: list[int] = []
    batch.on_done = lambda done: seen.append(done.result(0))
    device.submit(batch)
    assert seen == [0]


def test_a_batch_is_submitted_once() -> None:
    device = SimulatedDevice(MIB)
    batch = write_batch(unit(1), [(0, UNIT_BYTES)])
    device.submit(batch)
    with pytest.raises(InvalidArgument):
        device.submit(batch)
    with pytest.raises(InvalidArgument):
        device.wait(Batch(Direction.READ, Priority.LOAD))
    announced = write_batch(unit(1), [(0, UNIT_BYTES)])
    announced.on_done = lambda _: None
    device.submit(announced)
    with pytest.raises(InvalidArgument):
        device.wait(announced)


def test_deferred_writes_are_not_covered_by_a_flush_before_their_completion() -> None:
    device = SimulatedDevice(MIB, deferred=True)
    batch = write_batch(unit(1), [(0, UNIT_BYTES)])
    device.submit(batch)
    device.flush()
    seen = outcomes(device, 0, UNIT_BYTES)
    assert {unit(0), unit(1)} < seen, "in flight: landed in any part"
    device.wait(batch)
    assert unit(0) in outcomes(device, 0, UNIT_BYTES), "completed after the flush: still volatile"
    device.flush()
    assert outcomes(device, 0, UNIT_BYTES) == {unit(1)}


def test_kill_with_writes_in_flight_lands_any_part() -> None:
    device = SimulatedDevice(MIB, deferred=True)
    device.submit(write_batch(unit(1) * 2, [(0, 2 * UNIT_BYTES)]))
    rng = random.Random(4)
    seen = {device.crash_clone(rng, Crash.PROCESS_KILL).peek(0, 2 * UNIT_BYTES) for _ in range(300)}
    assert {bytes(2 * UNIT_BYTES), unit(1) * 2} < seen


def test_complete_finishes_batches_in_an_order_from_the_seed() -> None:
    orders = set()
    for seed in range(20):
        device = SimulatedDevice(MIB, deferred=True, seed=seed)
        order: list[int] = []
        for index in range(3):
            batch = write_batch(unit(index), [(index * UNIT_BYTES, UNIT_BYTES)])
            batch.on_done = lambda done, order=order: order.append(done.extents[0] // UNIT_BYTES)
            device.submit(batch)
        assert device.complete(1) == 1
        assert len(order) == 1
        assert device.complete() == 2
        orders.add(tuple(order))
    assert len(orders) > 2


def test_threads_announce_on_another_thread_and_wait_sleeps() -> None:
    device = SimulatedDevice(MIB, threads=True)
    names: list[str] = []
    announced = threading.Event()

    def on_done(batch: Batch) -> None:
        names.append(threading.current_thread().name)
        announced.set()

    batch = write_batch(unit(3), [(0, UNIT_BYTES)])
    batch.on_done = on_done
    device.submit(batch)
    assert announced.wait(10)
    assert names == ["blockkv-simulated"]
    target = memory(UNIT_BYTES)
    back = read_batch(target, [(0, UNIT_BYTES)])
    device.submit(back)
    device.wait(back)
    assert target.tobytes() == unit(3)
    device.close()
    assert not any(thread.name == "blockkv-simulated" for thread in threading.enumerate())


def test_strict_mode_names_rule_breakers() -> None:
    device = SimulatedDevice(MIB, deferred=True, strict=True)
    batch = write_batch(unit(1), [(0, UNIT_BYTES)])
    device.submit(batch)
    with pytest.raises(AssertionError, match="in flight"):
        device.flush()
    with pytest.raises(AssertionError, match="overlaps"):
        device.submit(write_batch(unit(2) * 2, [(0, 2 * UNIT_BYTES)]))
    with pytest.raises(AssertionError, match="at close"):
        device.close()
    device.wait(batch)
    device.flush()
    device.close()


# --- faults ---


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.ENOSPC, errno.ETIMEDOUT])
def test_errors_reach_the_caller_with_their_code(code: int) -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan.fail(0, code))
    with pytest.raises(DeviceError) as caught:
        device.read(0, UNIT_BYTES)
    assert caught.value.errno == code
    assert device.read(0, UNIT_BYTES) == unit(0)
    device.set_plan(FaultPlan.fail(2, code))
    with pytest.raises(DeviceError) as caught:
        device.flush()
    assert caught.value.errno == code
    assert device.timeline().endswith(f"2F!{errno.errorcode[code]}")


def test_a_failed_write_may_have_landed_in_any_part() -> None:
    seen = set()
    for seed in range(60):
        device = SimulatedDevice(MIB, seed=seed, plan=FaultPlan.fail(0))
        with pytest.raises(DeviceError):
            device.write(0, unit(1))
        seen.add(device.peek(0, UNIT_BYTES))
    assert {unit(0), unit(1)} < seen


def test_what_a_failed_flush_lost_stays_lost() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan.fail(1))
    device.write(0, unit(1))
    with pytest.raises(DeviceError):
        device.flush()
    device.flush()
    assert unit(0) in outcomes(device, 0, UNIT_BYTES), "retrying a failed flush must not help"
    killed = [device.crash_clone(random.Random(seed), Crash.PROCESS_KILL) for seed in range(60)]
    assert {unit(0), unit(1)} < {clone.peek(0, UNIT_BYTES) for clone in killed}
    for clone in killed:
        clone.flush()
        assert outcomes(clone, 0, UNIT_BYTES, 20) == {clone.peek(0, UNIT_BYTES)}
    device.write(0, unit(2))
    device.flush()
    assert outcomes(device, 0, UNIT_BYTES) == {unit(2)}


def test_lying_flush_is_silent_and_makes_nothing_durable() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan.lying())
    device.write(0, unit(1))
    device.flush()
    assert unit(0) in outcomes(device, 0, UNIT_BYTES)
    assert device.timeline() == "0W 0x0+4096 1F!lied"
    device.set_plan(None)
    device.flush()
    assert outcomes(device, 0, UNIT_BYTES) == {unit(1)}


def test_lost_write() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan((Fault(FaultKind.LOST, on=OperationKind.WRITE),)))
    device.write(0, unit(1))
    assert device.read(0, UNIT_BYTES) == unit(0)
    device.write(0, unit(2))
    assert device.read(0, UNIT_BYTES) == unit(2)


def test_torn_write_reports_success() -> None:
    seen = set()
    for seed in range(60):
        device = SimulatedDevice(MIB, seed=seed, plan=FaultPlan((Fault(FaultKind.TORN),)))
        device.write(0, unit(1))
        seen.add(device.peek(0, UNIT_BYTES))
    assert any(len(set(page)) == 2 for page in seen)


def test_misdirected_write_and_read() -> None:
    astray = Fault(FaultKind.MISDIRECTED, on=OperationKind.WRITE, target_offset_bytes=8192)
    device = SimulatedDevice(MIB, plan=FaultPlan((astray,)))
    device.write(0, unit(1))
    assert device.peek(0, UNIT_BYTES) == unit(0)
    assert device.peek(8192, UNIT_BYTES) == unit(1)
    astray = Fault(FaultKind.MISDIRECTED, on=OperationKind.READ, target_offset_bytes=8192)
    device.set_plan(FaultPlan((astray,)))
    assert device.read(0, UNIT_BYTES) == unit(1)
    assert device.read(0, UNIT_BYTES) == unit(0)
    drawn = SimulatedDevice(MIB, plan=FaultPlan((Fault(FaultKind.MISDIRECTED),), seed=3))
    drawn.write(0, unit(1))
    assert len(drawn.written_units()) == 1
    assert drawn.written_units() != [0]


def test_bit_rot_at_rest_and_by_plan() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(0))
    device.flip_bit(100, 3)
    assert device.read(0, UNIT_BYTES)[100] == 8
    rot = Fault(FaultKind.ROT, on=OperationKind.READ, rot_offset_bytes=200, rot_length_bytes=1)
    device.set_plan(FaultPlan((rot,)))
    changed = device.read(0, UNIT_BYTES)
    assert changed[200].bit_count() == 1
    assert sum(byte.bit_count() for byte in changed) == 2
    assert outcomes(device.clone(), 0, UNIT_BYTES, 5) == {changed}


def test_rot_survives_a_flush_of_the_rotten_unit() -> None:
    device = SimulatedDevice(MIB)
    device.write(0, unit(1))
    device.flip_bit(0, 7)
    device.flush()
    assert device.crash_clone(random.Random(1)).peek(0, 2) == b"\x81\x01"


def test_stop_fails_everything_after_and_leaves_the_request_in_any_part() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan.stop(2))
    device.write(0, unit(1))
    device.flush()
    with pytest.raises(DeviceError) as caught:
        device.write(0, unit(2))
    assert caught.value.errno == errno.ENODEV
    assert device.stopped
    for operation in (device.flush, lambda: device.discard(0, 4096)):
        with pytest.raises(DeviceLost):
            operation()
    with pytest.raises(DeviceError):
        device.read(0, UNIT_BYTES)
    seen = outcomes(device, 0, UNIT_BYTES)
    assert {unit(1), unit(2)} < seen
    rng = random.Random(8)
    killed = {device.crash_clone(rng, Crash.PROCESS_KILL).peek(0, UNIT_BYTES) for _ in range(300)}
    assert {unit(1), unit(2)} < killed


def test_stop_during_a_flush_covers_nothing() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan.stop(1))
    device.write(0, unit(1))
    with pytest.raises(DeviceLost):
        device.flush()
    assert unit(0) in outcomes(device, 0, UNIT_BYTES)


def test_every_operation_of_a_history_can_be_the_last() -> None:
    reached = 0
    for stop in itertools.count():
        device = SimulatedDevice(MIB, plan=FaultPlan.stop(stop))
        try:
            device.write(0, unit(1))
            device.submit(write_batch(unit(2) * 3, [(4096, 4096), (16384, 8192)]))
            device.flush()
            device.discard(0, 4096)
        except DeviceError:
            pass
        if not device.stopped:
            break
        reached += 1
    assert reached == 5, "one write, two extents, one flush, one discard"


def test_short_write_lands_exactly_its_first_bytes() -> None:
    device = SimulatedDevice(MIB, plan=FaultPlan((Fault(FaultKind.SHORT, done_bytes=4096 + 512),)))
    batch = write_batch(unit(1) * 3, [(0, 3 * UNIT_BYTES)])
    device.submit(batch)
    device.wait(batch)
    assert batch.result(0) == -errno.ENODEV
    killed = device.crash_clone(random.Random(1), Crash.PROCESS_KILL)
    assert killed.peek(0, 3 * UNIT_BYTES) == unit(1) + unit(1)[:512] + bytes(4096 - 512 + 4096)


def test_before_operation_sees_the_device_as_a_crash_would() -> None:
    device = SimulatedDevice(MIB)
    rng = random.Random(6)
    seen: list[tuple[OperationKind, set[bytes]]] = []

    def probe(kind: OperationKind) -> None:
        seen.append((kind, {device.crash_clone(rng).peek(0, UNIT_BYTES) for _ in range(200)}))

    device.before_operation = probe
    device.write(0, unit(1))
    device.flush()
    device.read(0, UNIT_BYTES)
    kinds = [kind for kind, _ in seen]
    assert kinds == [OperationKind.WRITE, OperationKind.FLUSH, OperationKind.READ]
    assert {unit(0), unit(1)} < seen[0][1], "in flight"
    assert {unit(0), unit(1)} < seen[1][1], "completed, not flushed"
    assert seen[2][1] == {unit(1)}
    assert device.crash_clone(rng).before_operation is None


def test_latency_is_slept_and_then_the_operation_succeeds() -> None:
    slept: list[float] = []
    plan = FaultPlan((Fault(FaultKind.LATENCY, latency_us=12_000_000),))
    device = SimulatedDevice(MIB, plan=plan, sleep=slept.append)
    device.write(0, unit(1))
    assert slept == [12.0]
    assert device.read(0, UNIT_BYTES) == unit(1)


def test_conditions_narrow_a_fault() -> None:
    fault = Fault(
        FaultKind.LOST,
        on=OperationKind.WRITE,
        within=(8192, 4096),
        skip_count=1,
        fire_count=1,
        probability=1.0,
    )
    device = SimulatedDevice(MIB, plan=FaultPlan((fault,)))
    device.write(0, unit(1))  # out of range
    device.write(8192, unit(2))  # skipped
    device.read(8192, UNIT_BYTES)  # another kind
    device.write(8192, unit(3))  # lost
    device.write(8192 - 4096, unit(4) * 3)  # spent
    assert device.counters()["faults_injected"] == 1
    assert device.timeline() == (
        "0W 0x0+4096 1W 0x2000+4096 2R 0x2000+4096 3W 0x2000+4096!lost 4W 0x1000+12288"
    )
    assert device.timeline(last=1) == "4W 0x1000+12288"


def test_probability_follows_the_plans_seed() -> None:
    def hits(seed: int) -> list[str]:
        fault = Fault(FaultKind.LOST, probability=0.5, fire_count=None)
        device = SimulatedDevice(MIB, plan=FaultPlan((fault,), seed))
        for _ in range(40):
            device.write(0, unit(1))
        return [operation.outcome for operation in device.operations()]

    assert hits(1) == hits(1)
    assert hits(1) != hits(2)
    assert 5 < hits(1).count("lost") < 35


def test_counters_count_requests_and_bytes() -> None:
    device = SimulatedDevice(MIB)
    device.submit(write_batch(unit(1) * 3, [(4096, 4096), (16384, 8192)]))
    device.read(0, UNIT_BYTES)
    device.flush()
    device.discard(0, 8192)
    counted = {name: value for name, value in device.counters().items() if value}
    assert counted == {
        "device_write_bytes": 12288,
        "device_write_count": 2,
        "device_read_bytes": 4096,
        "device_read_count": 1,
        "device_flush_count": 1,
        "device_discard_count": 1,
        "device_discard_bytes": 8192,
    }


def test_mixtures_are_all_the_torn_pages() -> None:
    pages = list(mixtures([unit(1), unit(2)]))
    assert len(pages) == len(set(pages)) == 256
    assert (pages[0], pages[-1]) == (unit(1), unit(2))
    assert len(set(mixtures([unit(1), unit(2), unit(3)], 2048))) == 9
