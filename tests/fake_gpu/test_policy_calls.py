"""A policy call of a rollout waits for the GPU once; its CUDA graphs are recorded for few numbers of rows."""

from __future__ import annotations

import pytest

from rlinf.rollout.cuda_stream import CudaStream
from tests.fake_gpu.child import call
from tests.fake_gpu.gpu import FakeGpu

HERE = __name__
IN_BF16 = ["model.precision=bf16", "model.micro_batch_size=4", "model.val_micro_batch_size=4"]
FAMILIES = {
    "openvla": ["experiment=quickstart", *IN_BF16, "model.init_config.action_decoding=autoregressive",
                "model.init_config.learned_placeholders=false", "model.is_lora=true"],
    "openvla_oft": ["experiment=tabletop_openvla_oft_tiny", *IN_BF16],
    "pi0": ["model=pi0_tiny", "env.state=proprio", *IN_BF16],
    "mlp": ["model=mlp", "model.micro_batch_size=4"],
}  # fmt: skip


def rollout(words, calls=1, one_by_one=False):
    """Counts of a rollout of 8 rows."""
    from tests.fake_gpu.runs import ActionRun, described

    with FakeGpu() as gpu, pytest.MonkeyPatch.context() as patch:
        if one_by_one:
            patch.setattr(CudaStream, "fetch", lambda stream, results: [result.cpu() for result in results])
        return described(ActionRun(gpu, words, rows=8, num_chunks=calls).policy_call())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_call_waits_once(family):
    for calls in (1, 3):
        counts = call(f"{HERE}:rollout", words=FAMILIES[family], calls=calls)
        assert counts["syncs"] == 0, counts["places"]["syncs"]
        assert counts["d2h"] == counts["waits"] == calls, (counts["places"]["d2h"], counts["places"]["waits"])
        assert all(place.startswith("rollout/cuda_stream.py") for place in counts["places"]["d2h"])
        sent = counts["places"]["h2d"]
        assert not [place for place in sent if place.startswith("models/sampling.py")], "random numbers go first"
        assert sum(count for place, count in sent.items() if place.startswith("rollout/cuda_stream.py")) == calls


def test_control_results_that_come_one_by_one_are_seen():
    assert call(f"{HERE}:rollout", words=FAMILIES["mlp"], one_by_one=True)["d2h"] == 4


ROWS_OF_CALLS = [64, 60, 33, 31, 17, 15, 9, 7, 2, 1]


def shrinking(words, with_graphs, padded=True):
    """Counts of a rollout whose episodes end one after the other."""
    from rlinf.models import cuda_graph
    from tests.fake_gpu.runs import ActionRun, described

    lengths = [sum(row < rows for rows in ROWS_OF_CALLS) for row in range(64)]
    with FakeGpu() as gpu, pytest.MonkeyPatch.context() as patch:
        if not padded:
            patch.setattr(cuda_graph, "padded_rows", lambda rows: rows)
        words = [*words, "model.action_chunks_len=1"]
        run = ActionRun(gpu, words, rows=64, num_chunks=len(ROWS_OF_CALLS), lengths=lengths)
        if with_graphs:
            run.model.check_cuda_graph(run.model.config, "sdpa")
            run.model.use_cuda_graph()
        counts = run.policy_call()
        return described(counts) | {"rows": run.batch.loss_mask.sum(1).tolist()}


@pytest.mark.parametrize("family", ["openvla", "openvla_oft", "pi0"])
def test_a_rollout_that_shrinks_from_64_rows_to_1_records_four_graphs(family):
    graphs = call(f"{HERE}:shrinking", words=FAMILIES[family], with_graphs=True)
    assert graphs["rows"] == ROWS_OF_CALLS and graphs["captures"] == 4
    assert graphs["d2h"] == len(ROWS_OF_CALLS)


def test_control_without_graphs_nothing_is_recorded():
    eager = call(f"{HERE}:shrinking", words=FAMILIES["openvla_oft"], with_graphs=False)
    assert eager["rows"] == ROWS_OF_CALLS and eager["captures"] == 0


def test_control_a_graph_for_each_number_of_rows_is_recorded_at_every_call():
    counts = call(f"{HERE}:shrinking", words=FAMILIES["openvla_oft"], with_graphs=True, padded=False)
    assert counts["captures"] == len(ROWS_OF_CALLS)


def warm(words, with_graphs):
    """Counts of the second of two rollouts of 8 rows, so without recordings."""
    from tests.fake_gpu.runs import ActionRun, described

    with FakeGpu() as gpu:
        run = ActionRun(gpu, words, rows=8)
        if with_graphs:
            run.model.use_cuda_graph()
        run.policy_call()
        return described(run.policy_call())


@pytest.mark.parametrize("family", ["openvla", "openvla_oft", "pi0"])
def test_a_graph_is_one_launch(family):
    eager, graph = (call(f"{HERE}:warm", words=FAMILIES[family], with_graphs=each) for each in (False, True))
    assert graph["captures"] == 0 and graph["places"]["ops"]["graph"] == 1
    assert graph["launches"] < eager["launches"] / 2, (graph["launches"], eager["launches"])
