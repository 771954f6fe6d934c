"""One of eight ranks, with a process group that is not there either: the bytes of its shards, and a step with them."""

import pytest
import torch

from tests.fake_gpu.cases import CASES
from tests.fake_gpu.child import call

HERE = __name__
RANKS = 8
WORDS = ["experiment=libero_ppo_openvla_oft", "model.override_config={}", "model.unnorm_key=null", "cluster.device=cpu"]
WHOLE = ["model.init_config={n_action_bins: 256}"]
FOUR_LAYERS = CASES["openvla_oft, all weights"].settings[1:2]
TOLERANCE = 0.01
"""``StateBytes`` divides exactly; a shard is padded to whole rows of its tensor."""


def sharded_bytes(words):
    """Return the bytes of a rank by ``StateBytes``, and those that lie on it after a step: weights, moments and gradients."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlinf.config.compose import compose_config
    from rlinf.config.schema import build_config
    from rlinf.distributed.parallel import Sharded, StateBytes
    from rlinf.optim.master_adamw import MasterAdamW
    from rlinf.preflight.memory import policy_on_meta_device
    from tests.fake_gpu.gpu import FakeGpu

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        model = policy_on_meta_device(build_config(compose_config([*WORDS, *words])))
        expected = StateBytes.of(model, RANKS)
        with FakeGpu() as gpu:
            Sharded(gpu.place(model), "cuda")
            weights = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = MasterAdamW(trained, lr=1e-5)
            with gpu.count() as counts:
                for parameter in trained:
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            moments = sum(m.to_local().nbytes for s in optimizer.state.values() for m in s.values() if m.ndim)
            gradients = sum(p.grad.to_local().nbytes for p in trained)
            formats = sorted({str(p.dtype) for p in trained})
        found = {"weights": weights, "gradients": gradients, "moments": moments, "masters": 0}
        return {"expected": vars(expected), "found": found, "formats": formats, "launches": counts.launches.total()}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("words", "gigabytes"),
    [([*WHOLE, "model.is_lora=false"], 15.1), ([*FOUR_LAYERS, "model.is_lora=true"], 0.4)],
    ids=["whole 7B", "adapters on four layers"],
)
def test_a_rank_holds_an_eighth(words, gigabytes):
    result = call(f"{HERE}:sharded_bytes", words=words)
    expected, found = result["expected"], result["found"]
    assert found == {name: pytest.approx(size, rel=TOLERANCE) for name, size in expected.items()}
    assert sum(found.values()) / 1e9 == pytest.approx(gigabytes, rel=0.05)
    assert result["formats"] == ["torch.float32"]  # trained 16-bit weights become float32 shards


def test_other_bytes_are_seen():
    results = [
        call(f"{HERE}:sharded_bytes", words=[*FOUR_LAYERS, "model.is_lora=true", f"model.lora.rank={rank}"])
        for rank in (32, 64)
    ]
    moments = [result["found"]["moments"] for result in results]
    assert moments[1] > (1 + 10 * TOLERANCE) * moments[0]
