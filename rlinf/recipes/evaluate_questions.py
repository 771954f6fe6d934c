"""Evaluates a language or vision-language model on a file of questions."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from rlinf import run_folder
from rlinf.checkpoints.folders import checkpoints_in
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import gather_objects, local_world_size, rank, resolve_device, set_num_threads
from rlinf.distributed.start import launch_context, started_here
from rlinf.errors import CheckpointError, ConfigError, RLinfError
from rlinf.files import follow_latest, sha256_of, write_text
from rlinf.llm.end_tokens import end_tokens
from rlinf.llm.hf_generation import HuggingFaceGeneration
from rlinf.llm.hf_model import load_config
from rlinf.manifest import Manifest, git_revision, library_versions
from rlinf.models.base_weights import weights_digest
from rlinf.models.loading import no_lora, num_positions
from rlinf.options import to_mapping
from rlinf.recipes.build import load_processor
from rlinf.recipes.completions import Completer
from rlinf.recipes.questions import Question, QuestionPacker, QuestionsConfig, read_questions, scoring
from rlinf.recipes.questions_result import QuestionResult, QuestionsResult
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.rollouts import LocalGenerator
from rlinf.recipes.samples import row_named
from rlinf.recipes.token_trainer import PRECISIONS, rank_slice, write_images
from rlinf.report.compare_folders import compare_folders, evaluation_folder
from rlinf.report.run_page import write_report
from rlinf.seeding import derive_seed
from rlinf.tracking.progress import Progress

logger = logging.getLogger("rlinf")

MODEL_CONFIG = "config.json"


def evaluate_questions(config: QuestionsConfig) -> QuestionsResult:
    """Evaluate a model on a file of questions.

    Writes ``result.json``, ``config.yaml``, ``manifest.json`` and ``report.html``, or nothing if a rank fails. Raise ConfigError
    before the model is loaded, ManifestMismatchError if the baseline's conditions differ, and RankError if a rank fails.
    """
    model = find_model(config.checkpoint)
    output = _output_folder(config, model, _run_of(model))
    place = launch_context(os.environ)
    num_processes = config.cluster.num_processes or (1 if place is None else place.size)
    device = resolve_device(config.device, started_here(num_processes), "device=cpu")
    deadlines = asdict(config.cluster.deadlines)
    launch(_evaluate_rank, (config, model, output), num_processes, device, deadlines=deadlines)
    return QuestionsResult.from_json(output / run_folder.RESULT_FILE)


def _evaluate_rank(work: tuple[QuestionsConfig, str, Path]) -> None:
    """Generate completions for this rank's fraction of the questions; rank 0 writes the result."""
    config, model, output = work
    set_num_threads(config.cluster.num_threads, local_world_size())
    with deadline("start"):
        questions = read_questions(config)
        has_options = all(question.has_options for question in questions)
        answer_type, reward, find = scoring(config.answer_type, has_options)
        baseline = None if config.compare is None else evaluation_folder(config.compare)
        processor = load_processor(model)
        declared = num_positions(load_config(model).get_text_config())
        packer = QuestionPacker(Path(config.questions).expanduser().parent, declared or 2**31)
        packer.prepare(processor)
        _check(questions, packer, config.questions)
        generator = _load(config, model, processor)
    completer = Completer(
        LocalGenerator(generator), packer.tokenizer, make_rewards(reward), batch_size=config.batch_size,
        max_new_tokens=config.max_tokens, end_tokens=end_tokens(generator.model, packer.tokenizer),
    )  # fmt: skip
    start = time.monotonic()
    with deadline("evaluate"):
        rank_results = _complete(questions, packer, completer, config, find)
        gathered = [scored for part in gather_objects(rank_results) for scored in part]
    if rank() == 0:
        seconds = time.monotonic() - start
        results = [replace(scored, images=write_images(output, previews)) for scored, previews in gathered]
        result = QuestionsResult(results, str(config.questions), answer_type, config.temperature, config.seed, seconds)
        manifest = _manifest(config, model, generator, answer_type)
        _write(config, questions, result, manifest, output, baseline, _run_of(model))


def _write(
    config: QuestionsConfig,
    questions: list[Question],
    result: QuestionsResult,
    manifest: Manifest,
    output: Path,
    baseline: Path | None,
    run: Path | None,
) -> None:
    """Write and print the result."""
    num_truncated = sum(scored.is_truncated for scored in result.results)
    if num_truncated > len(result.results) / 10:
        warning = (
            f"{num_truncated} of {len(result.results)} completions were truncated at max_tokens={config.max_tokens}"
        )
        result.warnings.append(warning)
        logger.warning(warning)
    manifest.save(output)
    write_text(output / run_folder.CONFIG_FILE, yaml.safe_dump(to_mapping(config), sort_keys=False))
    if config.file_per_question:
        _write_files(output, questions, result)
    result.to_json(output / run_folder.RESULT_FILE)
    print(f"{result.table()}\nresults: {output / run_folder.RESULT_FILE}", flush=True)
    if baseline is not None:
        try:
            print(compare_folders(baseline, output, config.allow_mismatch).table(), flush=True)
        except RLinfError as error:  # the message names the key of `rlinf evaluate` without questions
            raise error.with_message(str(error).replace("evaluation.allow_mismatch", "allow_mismatch")) from error
    print(f"report: {write_report(output)}", flush=True)
    if run is not None and (run / run_folder.METRICS_FILE).is_file():
        print(f"report of the run: {write_report(run)}", flush=True)


def find_model(path: str) -> str:
    """Find the model of a folder, a hub id, a run (its newest export) or ``latest``; raise CheckpointError if nothing is found."""
    folder = follow_latest(path)
    if path == run_folder.LATEST and not folder.exists():
        folder = Path("outputs")
    if not folder.exists():
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            return path
        raise CheckpointError(
            f"There is no folder {folder}; expected the folder of a model or of a run. Set checkpoint=<folder>"
        )
    if (folder / MODEL_CONFIG).is_file():
        return str(folder)
    no_lora(folder)
    if folder.parent.name == run_folder.CHECKPOINTS_FOLDER:
        run = folder.parents[1]
        names = [folder.name, *([run_folder.FINAL_FOLDER] if checkpoints_in(folder.parent)[-1:] == [folder] else [])]
        for twin in (run / run_folder.SAFETENSORS_FOLDER / name for name in names):
            if (twin / MODEL_CONFIG).is_file():
                return str(twin)
    depths = [f"{above}{run_folder.SAFETENSORS_FOLDER}/*" for above in ("", "*/", "*/*/")]
    exports = [path.parent for depth in depths for path in folder.glob(f"{depth}/{MODEL_CONFIG}")]
    if not exports:
        raise CheckpointError(
            f"{folder} contains no model: neither {MODEL_CONFIG} nor {run_folder.SAFETENSORS_FOLDER}/*/{MODEL_CONFIG} of a run. Export "
            f"one: rlinf export checkpoint={folder} output=<folder>"
        )
    newest = max(exports, key=lambda export: (export / MODEL_CONFIG).stat().st_mtime_ns)
    final = newest.with_name(run_folder.FINAL_FOLDER)
    return str(final if (final / MODEL_CONFIG).is_file() else newest)


def _run_of(model: str) -> Path | None:
    """Return the run folder that contains an exported model, or None if it is outside of any run."""
    folder = Path(model)
    return folder.parents[1] if folder.parent.name == run_folder.SAFETENSORS_FOLDER else None


def _output_folder(config: QuestionsConfig, model: str, run: Path | None) -> Path:
    """Return the output folder; raise ConfigError if a file in it would be overwritten."""
    if config.output_dir is not None:
        output = Path(config.output_dir).expanduser()
    elif run is not None:
        suffix = "" if Path(model).name == run_folder.FINAL_FOLDER else f"_{Path(model).name}"
        output = run / run_folder.EVALUATIONS_FOLDER / f"{Path(config.questions).stem}{suffix}"
    else:
        output = Path("outputs") / "questions" / time.strftime("%Y-%m-%d_%H-%M-%S")
    names = (run_folder.RESULT_FILE, run_folder.METRICS_FILE, MODEL_CONFIG)
    existing = next((name for name in names if (output / name).exists()), None)
    if existing is not None:
        raise ConfigError(
            f"output_dir is '{output}', which contains a {existing}; nothing is overwritten. Delete the folder, or set "
            "output_dir=<a new folder>"
        )
    return output


def _check(questions: list[Question], packer: QuestionPacker, file: str) -> None:
    """Raise ConfigError for an invalid question. To save time, only the images of the first question with images are read."""
    is_first = True
    for number, question in enumerate(questions):
        with row_named(number, file):
            packer.check_media(question)
            if is_first or not question.media:
                packer.question(question)
        is_first = is_first and not question.media


def _load(config: QuestionsConfig, model: str, processor: Any) -> HuggingFaceGeneration:
    dtype = config.dtype or str(load_config(model).dtype or "float32").removeprefix("torch.")
    return HuggingFaceGeneration(
        model, max_new_tokens=config.max_tokens, temperature=config.temperature or 1.0, seed=config.seed, torch_dtype=dtype,
        tokenizer=processor, device_map="auto" if config.device == "auto" else None,
    )  # fmt: skip


def _complete(
    questions: list[Question],
    packer: QuestionPacker,
    completer: Completer,
    config: QuestionsConfig,
    find: Callable[[str], str | None],
) -> list[tuple[QuestionResult, list[bytes]]]:
    """Return this rank's results with previews of their images, in question order; raise ConfigError for a bad image."""
    results: list[tuple[QuestionResult, list[bytes]]] = []
    progress = Progress(enabled=rank() == 0)
    # Ranks process complete batches, so that each batch has the same rows as in one process, and results are bit-identical.
    calls = [
        range(start, min(start + config.batch_size, len(questions)))
        for start in range(0, len(questions), config.batch_size)
    ][rank_slice(-(-len(questions) // config.batch_size))]
    num_questions = sum(map(len, calls))
    for rows in calls:
        prompts = []
        for row in rows:
            with row_named(row, config.questions):
                prompts.append(packer.question(questions[row]))
        seeds = [derive_seed(config.seed, "question", row) for row in rows] if config.temperature else None
        for row, completion in zip(rows, completer.complete(prompts, seeds), strict=True):
            question, text = questions[row], completion.text
            scored = QuestionResult(
                question.id, question.category, question.prompt, text, question.expected, find(text),
                completion.reward == 1, len(completion.tokens), completion.is_truncated,
            )  # fmt: skip
            results.append((scored, completion.prompt.previews))
        correct = sum(scored.is_correct for scored, _ in results)
        progress.update("questions", len(results), num_questions, correct=correct)
    progress.close()
    return results


def _manifest(config: QuestionsConfig, model: str, generator: HuggingFaceGeneration, answer_type: str) -> Manifest:
    """Return the manifest. Evaluations are comparable only if their ``questions`` are equal."""
    folder = Path(model)
    saved = Manifest.load(folder) if (folder / run_folder.MANIFEST_FILE).is_file() else None
    network = generator.model
    dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    if config.temperature:
        sampling["seed"] = config.seed
    prompt = {name: getattr(config, name) for name in ("request", "system_prompt", "fps", "max_pixels")}
    return Manifest(
        versions=library_versions(),
        model={"model_type": network.config.model_type, "class": type(network).__name__, "sha256": weights_digest(model)},
        normalization={}, preprocessing={}, actions={},
        lora=saved.lora if saved else {"state": "none"},
        precision=PRECISIONS[dtype], env={}, renderer=None,
        policy_version=saved.policy_version if saved else 0,
        seed=config.seed, git_revision=git_revision(),
        questions={"sha256": sha256_of(Path(config.questions).expanduser()), "answer_type": answer_type, **sampling, **prompt},
    )  # fmt: skip


def _write_files(output: Path, questions: list[Question], result: QuestionsResult) -> None:
    """Write one file per question: ``questions/<category>/<video or id>.json``."""
    written: set[Path] = set()
    for question, scored in zip(questions, result.results, strict=True):
        video = question.row.get("video")
        names = ([Path(video).stem] if isinstance(video, str) else []) + [scored.id.replace("/", "_")]
        folder = output / "questions" / scored.category.replace("/", "_")
        paths = [folder / f"{name}.json" for name in (names[0], "_".join(names))]
        path = next(path for path in paths if path not in written)
        written.add(path)
        write_text(path, json.dumps(vars(scored), indent=1, ensure_ascii=False))
