"""Batches of a dataset as behaviour cloning reads them, against a plain PyTorch ``DataLoader`` over the same folder.

``ours`` is what training uses: shuffled rows of ``StoredDemonstrations`` made ahead by ``Prefetcher``. ``peer`` is the usual form: a
map-style dataset that reads one row at a time (parquet row group, PNG or video frame), a shuffling sampler, the default
collate function and as many worker processes as ours has threads; each worker keeps the row groups and videos that it has
opened, and its first batches, which open them, are not counted. ``lerobot`` is the reader of that package, where it is
installed. All give uint8 images (lerobot: float32 in [0, 1], as it does) and the chunk of following actions.

They are read in alternating rounds; a round takes ``--batches`` batches after ``--warmup`` ones. The last line is JSON; ``ratio`` is
ours over the peer's samples/s. With ``--step-ms`` a training step of that length runs between two batches (it sleeps, as a process
does that waits for an accelerator), and ``data_wait_fraction`` is the share of the time spent waiting for rows.

With ``--train`` and the overrides of a training command, real steps of behaviour cloning are timed in the place of all that: with
the rows in memory, decoded, and with the rows from disk, as training reads them. ``useful_fraction`` is the time of a step in
memory over that of one from disk: what reading costs, the processor time of the reading threads included.

    python benchmarks/sft_data.py --dataset data/tabletop [--batch-size 64] [--chunk-len 8] [--workers 2] [--step-ms 0]
    python benchmarks/sft_data.py --dataset data/tabletop --train model=openvla_tiny env=tabletop
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rlinf.commands.open_checkpoint import statistics_of_env
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.data.formats import open_dataset as open_for_env
from rlinf.data.lerobot_dataset import describe, open_dataset
from rlinf.data.lerobot_format import ACTION, read_info
from rlinf.data.prefetch import Prefetcher
from rlinf.data.rows import BatchSource, shuffled_rows
from rlinf.data.video import VideoReader
from rlinf.distributed.process_group import resolve_device
from rlinf.envs import make_env
from rlinf.models import build_policy
from rlinf.preflight.validation import validate
from rlinf.rollout.demonstrations import Demonstrations
from rlinf.training.train_worker import TrainWorker, sft_trainer_config


class PlainDataset(Dataset):
    """One row at a time, straight from the files of a LeRobotDataset; row groups that were read are kept."""

    def __init__(self, folder: Path, chunk_len: int) -> None:
        self.folder, self.chunk_len, self.info = folder, chunk_len, read_info(folder)
        self.cameras = list(describe(folder).image_shapes)
        self.paths = sorted((folder / "data").glob("*/*.parquet"))
        self.place: list[tuple[int, int, int]] = []
        for file, path in enumerate(self.paths):
            metadata = pq.read_metadata(path)
            for group in range(metadata.num_row_groups):
                self.place += [(file, group, row) for row in range(metadata.row_group(group).num_rows)]
        self.episodes = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
        self.held: dict[tuple[int, int], dict[str, list]] = {}
        self.videos: dict[Path, VideoReader] = {}

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        file, group, row = self.place[index]
        if (file, group) not in self.held:
            self.held[file, group] = pq.ParquetFile(self.paths[file]).read_row_group(group).to_pydict()
        columns = self.held[file, group]
        following = columns[ACTION][row : row + self.chunk_len]
        item = {ACTION: torch.tensor(following + following[-1:] * (self.chunk_len - len(following)))}
        for key in self.cameras:
            item[key] = torch.from_numpy(self._image(key, columns, row))
        return item

    def _image(self, key: str, columns: dict[str, list], row: int) -> np.ndarray:
        if key in columns:
            return np.array(Image.open(io.BytesIO(columns[key][row]["bytes"])).convert("RGB"))
        about = self.episodes[columns["episode_index"][row]]
        where = {name: about[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        path = self.folder / self.info["video_path"].format(video_key=key, **where)
        if path not in self.videos:
            self.videos[path] = VideoReader(path)
        return self.videos[path].frame_at(about[f"videos/{key}/from_timestamp"] + columns["timestamp"][row])


def prefetched(source: BatchSource, batch_size: int, num_workers: int) -> Prefetcher:
    """Shuffled batches, made ahead by threads."""
    return Prefetcher(lambda step: source.rows(shuffled_rows(len(source), step, batch_size, 0)), 0, num_workers)


def ours(arguments: argparse.Namespace) -> Iterator[Any]:
    """Batches as training reads them."""
    columns = describe(arguments.dataset).image_shapes
    dataset = open_dataset(arguments.dataset, {key: key for key in columns}, None)
    dataset.chunk_len = arguments.chunk_len
    with prefetched(dataset, arguments.batch_size, arguments.workers) as batches:
        while True:
            yield batches.next()


def loader(dataset: Dataset, arguments: argparse.Namespace) -> Iterator[Any]:
    """Batches of PyTorch's loader, epoch after epoch."""
    made = DataLoader(
        dataset, batch_size=arguments.batch_size, shuffle=True, drop_last=True, num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
    )  # fmt: skip
    while True:
        yield from made


def peer(arguments: argparse.Namespace) -> Iterator[Any]:
    """Batches of a plain map-style dataset."""
    return loader(PlainDataset(arguments.dataset, arguments.chunk_len), arguments)


def lerobot(arguments: argparse.Namespace) -> Iterator[Any]:
    """Batches of lerobot's own reader."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    ahead = [step / read_info(arguments.dataset)["fps"] for step in range(arguments.chunk_len)]
    return loader(LeRobotDataset("local/dataset", root=arguments.dataset, delta_timestamps={ACTION: ahead}), arguments)


def measure(batches: Iterator[Any], arguments: argparse.Namespace) -> tuple[float, float]:
    """Return samples/s and the share of the time spent waiting, over one round."""
    for _ in range(arguments.warmup):
        next(batches)
    waited, start = 0.0, time.perf_counter()
    for _ in range(arguments.batches):
        before = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - before
        time.sleep(arguments.step_ms / 1000)
    elapsed = time.perf_counter() - start
    return arguments.batches * arguments.batch_size / elapsed, waited / elapsed


def measure_training(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps of behaviour cloning with the rows in memory and from disk, in alternating rounds, and print both."""
    overrides = [
        *arguments.train,
        f"sft.dataset={arguments.dataset}",
        f"sft.batch_size={arguments.batch_size}",
        "sft.max_steps=1",
    ]
    config = build_config(compose_config(overrides))
    validate(config, "sft")
    env = make_env(config.env, 1, auto_reset=False)
    dataset = open_for_env(config.sft, env)
    model = build_policy(config, statistics_of_env(config, env, dataset)).to(resolve_device(config.cluster.device, 1))
    env.close()
    dataset.chunk_len = model.sft_chunk_len
    worker = TrainWorker(
        model, sft_trainer_config(config.trainer, config.sft), temperature=1.0, precision=config.model.precision,
        micro_batch_size=config.model.micro_batch_size, val_micro_batch_size=config.model.val_micro_batch_size,
    )  # fmt: skip
    sources = {"memory": Demonstrations(*dataset.rows(np.arange(len(dataset))), []), "disk": dataset}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in range(arguments.rounds):
        for name, source in sources.items():
            num_workers = arguments.workers if name == "disk" else 0
            with prefetched(source, arguments.batch_size, num_workers) as batches:
                found[name].append(time_steps(worker, batches, arguments))
    steps = {name: statistics.median(step for step, _ in rounds) for name, rounds in found.items()}
    waits = {name: statistics.median(wait for _, wait in rounds) for name, rounds in found.items()}
    for name in sources:
        print(f"{name:<8} {1000 * steps[name]:9.1f} ms a step   waiting {waits[name]:6.1%}")
    return {
        "benchmark": "sft_step", "useful_fraction": steps["memory"] / steps["disk"], "step_s": steps, "data_wait_fraction": waits,
        "batch_size": arguments.batch_size, "workers": arguments.workers, "train": arguments.train,
    }  # fmt: skip


def time_steps(worker: TrainWorker, batches: Prefetcher, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return seconds per step, waiting included, and the share of them spent waiting, over one round."""
    waited = elapsed = 0.0
    for number in range(arguments.warmup + arguments.batches):
        start = time.perf_counter()
        observation, actions = batches.next()
        waiting = time.perf_counter() - start
        # Its loss is read, so an accelerator has ended, too.
        worker.sft_update(observation, actions, arguments.batch_size, number, number)
        if number >= arguments.warmup:
            waited, elapsed = waited + waiting, elapsed + time.perf_counter() - start
    return elapsed / arguments.batches, waited / elapsed


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, and return what the last line holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--chunk-len", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--train", nargs="+", metavar="KEY=VALUE")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    if arguments.train:
        result = measure_training(arguments)
        print(json.dumps(result))
        return result
    kinds: dict[str, Callable[[argparse.Namespace], Iterator[Any]]] = {"ours": ours, "peer": peer}
    spec = importlib.util.find_spec("lerobot")
    if spec is not None and spec.origin is not None:  # a folder of that name is not a package
        kinds["lerobot"] = lerobot
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name, make in kinds.items():
            batches = make(arguments)
            found[name].append(measure(batches, arguments))
            batches.close()
    rates = {name: statistics.median(rate for rate, _ in rounds) for name, rounds in found.items()}
    waits = {name: statistics.median(wait for _, wait in rounds) for name, rounds in found.items()}
    for name in kinds:
        print(f"{name:<8} {rates[name]:9.0f} samples/s   waiting {waits[name]:6.1%}")
    result = {
        "benchmark": "sft_data", "ratio": rates["ours"] / rates["peer"], "samples_per_s": rates, "data_wait_fraction": waits,
        "batch_size": arguments.batch_size, "workers": arguments.workers, "step_ms": arguments.step_ms,
    }  # fmt: skip
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
