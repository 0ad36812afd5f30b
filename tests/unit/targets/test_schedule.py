"""Time from a schedule: libtpu's cycles, waits for transfers, loops, and HBM traffic that counts what is looked at."""

from __future__ import annotations

import pytest

from tpu_compile.errors import ConfigError
from tpu_compile.targets.chips import CHIPS, chip, slice_name
from tpu_compile.targets.hlo import parse
from tpu_compile.targets.schedule import Schedule, schedule

V5E = CHIPS["v5e"]
MEGA = 2**20


def read(body: str, before: str = "", parameters: str = "a: f32[1024,1024]") -> Schedule:
    text = f"HloModule m\n\n{before}\nENTRY %main ({parameters}) -> f32[] {{\n{body}\n}}\n"
    return schedule(parse(text), V5E)


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


ARGUMENT = "  %a = f32[1024,1024]{1,0:T(8,128)} parameter(0)\n"


def test_steps_follow_one_another_at_the_chips_clock() -> None:
    found = read(
        ARGUMENT
        + f"  %b = f32[1024,1024]{{1,0:T(8,128)}} add(%a, %a), {cycles(3000)}\n"
        + f"  ROOT %c = f32[1024,1024]{{1,0:T(8,128)}} copy(%b), {cycles(1500)}\n"
    )
    assert found.cycles == 4500 and found.seconds == pytest.approx(4500 / V5E.clock)
    assert [step.kind for step in found.steps] == ["fusion", "layout"] and found.steps[1].bound == "layout"
    assert found.seconds_by("libtpu") == found.seconds
    assert found.bytes == (3 + 2) * 4 * MEGA


@pytest.mark.parametrize("says", ["", f", {cycles(2**63 - 1)}"], ids=["nothing", "the largest number"])
def test_a_step_without_an_estimate_takes_what_its_traffic_takes(says: str) -> None:
    (step,) = read(ARGUMENT + f"  ROOT %b = f32[1024,1024]{{1,0:T(8,128)}} sort(%a), dimensions={{0}}{says}\n").steps
    assert step.by == "roofline" and step.seconds == pytest.approx(2 * 4 * MEGA / V5E.hbm_bandwidth)


def test_what_lies_in_vmem_is_no_traffic() -> None:
    found = read(ARGUMENT + f"  ROOT %b = f32[1024,1024]{{1,0:T(8,128)S(1)}} negate(%a), {cycles(10)}\n")
    assert found.bytes == 4 * MEGA


def transfer(between: int) -> Schedule:
    array = "f32[1024,1024]{1,0:T(8,128)"
    return read(
        ARGUMENT
        + f"  %s = ({array}S(1)}}, {array}}}, u32[]{{:S(2)}}) copy-start(%a)\n"
        + f"  %w = f32[]{{:T(128)}} constant(0)\n  %x = f32[8]{{0:S(1)}} broadcast(%w), {cycles(between)}\n"
        + f"  ROOT %d = {array}S(1)}} copy-done(%s)\n"
    )


def test_a_transfer_runs_beside_the_steps_and_what_is_left_of_it_is_waited_for() -> None:
    whole = 4 * MEGA / V5E.hbm_bandwidth
    early = transfer(100)
    assert early.steps[-1].kind == "wait" and early.seconds == pytest.approx(whole)
    late = transfer(10**6)
    assert [step.kind for step in late.steps] == ["fusion"], "it had arrived"
    assert early.transfers == late.transfers == 4 * MEGA


def test_a_loop_counts_every_turn() -> None:
    before = (
        "%body (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0:S(1)} parameter(0)\n"
        f"  ROOT %n = f32[8]{{0:S(1)}} negate(%p), {cycles(700)}\n}}\n"
        "%cond (q: f32[8]) -> pred[] {\n  %q = f32[8]{0:S(1)} parameter(0)\n  ROOT %t = pred[] constant(true)\n}\n"
    )
    body = (
        "  %a = f32[8]{0:S(1)} parameter(0)\n  ROOT %w = f32[8]{0:S(1)} while(%a), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"12"}}'
    )
    assert read(body, before, "a: f32[8]").cycles == 12 * 700


def test_a_loop_that_counts_to_a_constant_is_counted() -> None:
    before = (
        "%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {\n  %p = (s32[], f32[8]{0:S(1)}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n  %x = f32[8]{0:S(1)} get-tuple-element(%p), index=1\n"
        f"  %n = f32[8]{{0:S(1)}} negate(%x), {cycles(700)}\n"
        "  ROOT %t = (s32[], f32[8]{0:S(1)}) tuple(%i, %n)\n}\n"
        "%cond (q: (s32[], f32[8])) -> pred[] {\n  %q = (s32[], f32[8]{0:S(1)}) parameter(0)\n"
        "  %j = s32[] get-tuple-element(%q), index=0\n  %last = s32[] constant(12)\n"
        "  ROOT %c = pred[] compare(%j, %last), direction=LT\n}\n"
    )
    body = (
        "  %a = f32[8]{0:S(1)} parameter(0)\n  %first = s32[] constant(2)\n  %s = s32[] copy(%first)\n"
        "  %t = (s32[], f32[8]{0:S(1)}) tuple(%s, %a)\n"
        "  ROOT %w = (s32[], f32[8]{0:S(1)}) while(%t), condition=%cond, body=%body"
    )
    assert read(body, before, "a: f32[8]").cycles == 10 * 700


def test_collectives_cross_the_interconnect() -> None:
    found = read(ARGUMENT + "  ROOT %r = f32[1024,1024]{1,0:T(8,128)} all-reduce(%a), replica_groups={}\n")
    (step,) = found.steps
    assert (step.kind, step.bound) == ("collective", "interconnect")
    assert found.seconds == found.roofline == pytest.approx(2 * 4 * MEGA / V5E.ici_bandwidth)


def test_a_gather_reads_rows_and_an_update_in_place_writes_them() -> None:
    before = (
        "%gathered (p: f32[50000,128], i: s32[8]) -> f32[8,128] {\n"
        "  %p = f32[50000,128]{1,0:T(8,128)} parameter(0)\n  %i = s32[8]{0} parameter(1)\n"
        "  ROOT %g = f32[8,128]{1,0:T(8,128)S(1)} gather(%p, %i), offset_dims={1}\n}\n"
        "%updated (p: f32[50000,128], u: f32[8,128], z: s32[]) -> f32[50000,128] {\n"
        "  %p = f32[50000,128]{1,0:T(8,128)} parameter(0)\n  %u = f32[8,128]{1,0:T(8,128)S(1)} parameter(1)\n"
        "  %z = s32[] parameter(2)\n"
        "  ROOT %d = f32[50000,128]{1,0:T(8,128)} dynamic-update-slice(%p, %u, %z, %z)\n}\n"
    )
    body = (
        "  %a = f32[50000,128]{1,0:T(8,128)} parameter(0)\n  %i = s32[8]{0:S(1)} parameter(1)\n"
        "  %z = s32[]{:S(6)} constant(0)\n"
        f"  %g = f32[8,128]{{1,0:T(8,128)S(1)}} fusion(%a, %i), kind=kCustom, calls=%gathered, {cycles(5)}\n"
        f"  ROOT %d = f32[50000,128]{{1,0:T(8,128)}} fusion(%a, %g, %z), kind=kLoop, calls=%updated, {cycles(5)}\n"
    )
    gather, update = read(body, before, "a: f32[50000,128], i: s32[8]").steps
    assert (gather.kind, gather.bytes, update.bytes) == ("gather", 8 * 128 * 4, 8 * 128 * 4)


def test_the_least_time_is_that_of_the_slower_of_flops_and_traffic() -> None:
    product = (
        "  %a = f32[1024,1024]{1,0:T(8,128)S(1)} parameter(0)\n"
        "  ROOT %c = f32[1024,1024]{1,0:T(8,128)S(1)} convolution(%a, %a), dim_labels=bf_io->bf, "
        f"operand_precision={{highest,highest}}, {cycles(10**6)}\n"
    )
    found = read(product)
    assert found.steps[0].kind == "product" and found.flops == 2 * 1024**3
    assert found.roofline == pytest.approx(6 * found.flops / V5E.peak("bf16"))


# ---- chips


def test_a_generation_stands_for_its_smallest_slice() -> None:
    assert [slice_name(name) for name in ("v5e", "tpu7x", "v5e:4x4")] == ["v5e:1x1", "tpu7x:2x2x1", "v5e:4x4"]
    assert chip("v6e:2x2") is CHIPS["v6e"]
    with pytest.raises(ConfigError, match="v5p"):
        chip("v5:2x2")


@pytest.mark.parametrize(("name", "gigahertz"), [("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75)])
def test_clocks_are_the_published_ones(name: str, gigahertz: float) -> None:
    assert CHIPS[name].clock / 1e9 == pytest.approx(gigahertz, rel=0.01)


def test_a_device_is_its_share_of_a_chip() -> None:
    assert CHIPS["tpu7x"].peak("bf16") * CHIPS["tpu7x"].devices == pytest.approx(2307e12)
    assert CHIPS["tpu7x"].peak("f8e4m3fn") == pytest.approx(2 * CHIPS["tpu7x"].peak("bf16"))
    assert all(each.usable_bytes < each.hbm_bytes * 1.01 for each in CHIPS.values())
