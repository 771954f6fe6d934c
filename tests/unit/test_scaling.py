"""The performance model against hand calculations, and against a desk check of a design that gathered all samples."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from scaling_model import Line, Machine, Workload, measured, predict

MACHINE = Machine(gpus=8, gpu_link=400e9, node_link=50e9, memory=1e12, latency_s=0.0)
WORK = Workload(
    samples=64, env_groups=16, rollout=Line(1.0, 0.5), score=Line(0.0, 0.1), update=Line(0.2, 0.4), steps=4,
    sample_bytes=1e9, gradient_bytes=8e9, pushed_bytes=16e9,
)  # fmt: skip


def test_a_line_goes_through_what_was_measured():
    assert Line.through([(10, 3.0), (30, 7.0)]) == Line(1.0, 0.2)
    assert Line.through([(10, 3.0)]) == Line(0.0, 0.3)
    no_negative_part = Line(0.0, pytest.approx((10 + 60) / 500))
    assert Line.through([(10, 1.0), (20, 3.0)]) == no_negative_part
    assert Line.through([(10, 3.0), (20, 1.0)]) == Line(2.0, 0.0)


def test_collectives_by_hand():
    assert MACHINE.gather_s(8e9, 1) == 0
    assert MACHINE.gather_s(8e9, 4) == 8e9 * 3 / 4 / 400e9
    assert MACHINE.gather_s(8e9, 32) == 8e9 * 3 / 4 / 50e9  # four machines: the slower link decides
    assert MACHINE.reduce_s(8e9, 32) == 2 * 8e9 * 3 / 4 / 50e9
    assert Machine(latency_s=1e-3, gpu_link=math.inf).gather_s(1.0, 8) == pytest.approx(3e-3)


def test_the_three_placements_by_hand():
    """64 samples on 4 GPUs: 16 for each."""
    rollout, training, reducing = 1 + 16 * 0.5, 16 * 0.1 + 0.2 + 16 * 0.4, 4 * 2 * 8e9 * 3 / 4 / 400e9
    push = 16e9 * 3 / 4 / 400e9
    one = predict(WORK, MACHINE, "colocated", 4, 4)
    assert one.seconds == pytest.approx(rollout + training + reducing + push)
    assert one.busy_s["workers"] == 8.0 and one.busy_s["trainers"] == pytest.approx(8.2) and one.limit == "trainers"
    assert one.memory == 64e9  # 4 GPUs with 16 samples of 1 GB
    moved, sent = 16e9 / 400e9, 16e9 / 400e9  # samples into a trainer, weights into its one rollout worker
    two = predict(WORK, MACHINE, "disaggregated", 4, 4)
    assert two.seconds == pytest.approx(rollout + moved + training + reducing + push + sent)
    three = predict(WORK, MACHINE, "async", 4, 4)
    assert three.seconds == pytest.approx(max(rollout + moved, training + reducing) + push + sent)
    apart = predict(WORK, MACHINE, "async", 8, 16)  # three machines: a GPU's part of the link is 50e9 / 8
    assert apart.busy_s["moving samples"] == pytest.approx(8e9 / (50e9 / 8))
    assert apart.busy_s["pushing weights"] == pytest.approx(16e9 * 7 / 8 / 400e9 + 2 * 16e9 / (50e9 / 8))


LIBERO_SAMPLES, IMAGE_BYTES = 8192, 256 * 256 * 3
"""Of a GPU: 128 episodes of 64 policy calls, one camera."""


@pytest.mark.parametrize(
    ("gpus", "images", "small_objects", "large_objects", "uniforms"),
    [(8, 12.9e9, 72e6, 2.2e9, 0.8e9), (64, 103e9, 0.6e9, 17e9, 6.7e9), (1024, 1.65e12, 9e9, 276e9, 107e9)],
)
def test_a_design_that_gathers_all_samples_is_the_desk_check(gpus, images, small_objects, large_objects, uniforms):
    """Bytes on every rank of what was gathered; OFT has 1.1 kB and pi0 33 kB of objects a sample, pi0 12.8 kB of uniforms."""
    sizes = (LIBERO_SAMPLES * gpus, 128 * gpus, *[Line(0.0, 0.0)] * 3)
    for sample_bytes, wanted in (
        (IMAGE_BYTES, images),
        (1.1e3, small_objects),
        (33e3, large_objects),
        (12.8e3, uniforms),
    ):
        work = Workload(*sizes, sample_bytes=sample_bytes, gathers_samples=True)
        everywhere = predict(work, Machine(memory=800e9), "colocated", gpus, gpus)
        assert everywhere.memory / 8 == pytest.approx(wanted, rel=0.06)
        if sample_bytes == IMAGE_BYTES:
            assert (everywhere.limit == "main memory") == (gpus >= 64)  # 825 GB of a machine at 64 GPUs
    now = Workload(*sizes, sample_bytes=IMAGE_BYTES)
    assert predict(now, Machine(memory=800e9), "colocated", gpus, gpus).memory == 8 * LIBERO_SAMPLES * IMAGE_BYTES


def test_phases_are_medians_without_the_first_iteration():
    lines = [{"step": 0, "eval/success_rate": 1.0}]
    for seconds in (9.0, 1.0, 3.0, 2.0):
        names = ("rollout", "logprob", "update", "sync")
        lines.append({f"time/{name}_s": seconds * (k + 1) for k, name in enumerate(names)})
    assert measured(lines) == {"rollout": 2.0, "score": 4.0, "update": 6.0, "push": 8.0}
    with pytest.raises(ValueError, match="no iteration"):
        measured(lines[:2])
