"""Groups beside a default group that is bound to a GPU; gloo takes the place of NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlinf.distributed import process_group
from tests.fake_gpu.child import call


def groups_of_a_rank_with_a_gpu() -> dict:
    """Join a group as ``launch`` does on a GPU, and make others; return what they are."""
    gpu, stand_in = torch.device("cuda", 0), process_group.backend_of("cuda").replace("nccl", "gloo")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        patch.setattr(process_group, "backend_of", lambda device: stand_in)
        dist.init_process_group(stand_in, world_size=1, rank=0, store=dist.HashStore(), device_id=gpu)
        try:
            try:
                dist.new_group(backend=process_group.GLOO)
            except RuntimeError as error:
                found["torch's own"] = str(error)
            answers = [None]
            dist.all_gather_object(answers, "an object", group=process_group.new_group())
            found["answers"], found["bound"] = answers, str(dist.group.WORLD.bound_device_id)
            shards = process_group.new_mesh("cuda", 1).get_group("shards")
            backends = {name: shards._get_backend(torch.device(name)) for name in ("cpu", "cuda")}
            found["threads"] = backends["cpu"].options._threads
            found["timeouts"] = [each.options._timeout == process_group.GROUP_TIMEOUT for each in backends.values()]
        finally:
            dist.destroy_process_group()
    return found


def test_a_rank_with_a_gpu_makes_groups_for_the_cpu_and_meshes():
    found = call(f"{__name__}:groups_of_a_rank_with_a_gpu")
    assert "No backend type associated with device type cuda" in found["torch's own"], "else the mend is not needed"
    assert found["answers"] == ["an object"] and found["bound"] == "cuda:0"
    assert found["threads"] == 1 and found["timeouts"] == [True, True]
