"""Language models small enough for every test, and nothing that one test leaves to the next."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import slow_tests

from rlinf.algorithms import ALGORITHMS
from rlinf.envs import ENVS
from rlinf.models import MODELS

# Classes and plugins that worker processes import by name.
sys.path.append(str(Path(__file__).parent / "fixtures"))
# Some tests press Ctrl-C or hang up, which a shell has its background jobs, and nohup its command, ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# pytest-xdist gives its processes the width of a terminal, to which tables would be wrapped.
os.environ.pop("COLUMNS", None)
# Without bytecode on disk, each process that a test starts compiles the package again (a second), and each worker all tests (ten).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A thread that waits for another one leaves it the core: with two threads per process, spinning takes 60 times the computation.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The same examples in every run, however slowly they are drawn.
hypothesis.settings.register_profile(
    "rlinf", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("rlinf")


def pytest_configure(config):
    slow_tests.choose(config)
    if os.environ.get("RLINF_RECORD_SLOW") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(slow_tests.Recorder())


def pytest_collection_modifyitems(items):
    slow_tests.mark(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow_tests.order(items)


@pytest.fixture(autouse=True, scope="module")
def processes_are_forked(request):
    """Instead of new ones, except in files whose subject is their start."""
    if request.node.get_closest_marker("new_processes"):
        yield
        return
    from forked_engines import forked_engines
    from forked_processes import forked_processes

    with forked_processes(), forked_engines():
        yield


@pytest.fixture(autouse=True)
def random_numbers_do_not_depend_on_other_tests():
    """Which tests come before one in its process depends on the number of test processes, and on their speed."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def gpus_are_hidden_from_no_other_file():
    """A command on the CPU hides the GPUs from its process, and robosuite cannot read the empty list."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield
    if before is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def plugins_go_again(folder: Path):
    """Two tests may write a plugin of one name, and a plugin that is still imported does not register again."""
    tests = Path(__file__).parent
    places = (str(folder), str(tests / "fixtures"), str(tests.parent / "examples" / "embodiment" / "plugins"))
    modules, path = set(sys.modules), list(sys.path)
    registries = {registry: dict(registry.entries()) for registry in (ALGORITHMS, ENVS, MODELS)}
    yield
    for registry, entries in registries.items():
        registry._entries = entries
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(places):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def plugins_of_other_files_are_gone(tmp_path_factory):
    """Those that the fixtures of a file have registered."""
    with plugins_go_again(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def plugins_of_other_tests_are_gone(tmp_path_factory):
    with plugins_go_again(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A Megatron policy makes one in this process. Which tests come after it here depends on the number of test processes."""
    yield
    groups = sys.modules.get("megatron.core.parallel_state")
    if groups is not None:
        groups.destroy_model_parallel()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory):
    """``tiny_lm(family="llama", seed=0, **config fields)`` returns the folder of a random causal language model.

    Weights are drawn wide, so that attention, positions and caches show in the log-probabilities.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folders: dict = {}

    def build(family: str = "llama", seed: int = 0, **fields) -> str:
        key = (family, seed, repr(sorted(fields.items())))
        if key not in folders:
            sizes = {
                "vocab_size": 48,
                "initializer_range": 0.3,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
            }
            if family == "gpt2":
                sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
            else:
                sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **fields}))
            folders[key] = str(tmp_path_factory.mktemp(family))
            model.save_pretrained(folders[key])
        return folders[key]

    return build


@pytest.fixture
def prompts():
    """Four right-padded prompts of 6, 4, 5 and 2 tokens."""
    import torch

    from rlinf.distributed import BatchedDataDict

    ids = torch.randint(3, 48, (4, 6), generator=torch.Generator().manual_seed(7))
    mask = torch.arange(6) < torch.tensor([6, 4, 5, 2]).unsqueeze(1)
    return BatchedDataDict({"input_ids": ids * mask, "attention_mask": mask.long()})
