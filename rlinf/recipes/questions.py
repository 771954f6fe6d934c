"""Read question files (multiple choice or exact answers), convert them to prompts, and extract answers from completions."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.distributed.config import DeadlinesConfig
from rlinf.errors import ConfigError, did_you_mean
from rlinf.options import PathText, option
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.messages import IMAGE_MARK, check_messages, images_of, system_of, text_parts
from rlinf.recipes.packers import ChatPacker, text_tokens
from rlinf.recipes.rewards import EXTRACTORS, REWARDS, Reward
from rlinf.recipes.row_files import KINDS, as_reference, as_text, scalar_text, stream_rows
from rlinf.recipes.samples import BadRowError, Message, Prompt, Row, row_named

SUFFIXES = (*KINDS, ".parquet")
LETTER, REASONING = "letter", "reasoning"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPT_COLUMNS = ("prompt", "question", "messages", "conversations")
LETTER_REQUEST = "Answer with the letter of the option only."
REASONING_REQUEST = (
    "Answer with the letter of the option. First write your thoughts, then the answer, with an empty line between them, like this:\n"
    "<think>\nyour thoughts\n</think>\n\n<answer>\nthe letter\n</answer>"
)
"""Request used by ``examples/reasoning/tools/dataset/cosmos_grpo.py``, which trains this format."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LETTER = re.compile("[A-Z]")


@dataclass
class QuestionRanksConfig:
    """Processes for an evaluation on questions."""

    num_processes: int | None = option(None, "Ranks; null: one, or as started by torchrun or srun.", minimum=1)
    num_threads: int | None = option(None, "CPU threads per rank; null: OMP_NUM_THREADS, or cores / ranks.", minimum=1)
    deadlines: DeadlinesConfig = option(DeadlinesConfig(), "Deadlines for starting, evaluating and saving.")


@dataclass
class QuestionsConfig:
    """Keys for ``rlinf evaluate questions=...``."""

    checkpoint: PathText = option("", "Model folder, hub id, recipe run, or latest: the newest run in outputs/.")
    questions: PathText = option("", "Question file in jsonl, json, csv, tsv or parquet format.")
    output_dir: PathText | None = option(None, "Result folder; null: in the run folder, or outputs/questions/<time>.")
    answer_type: str | None = option(
        None,
        "letter: first capital letter; reasoning: first one in the answer tags (default with options); or a reward such as gsm8k.",
    )
    prompt_column: str | None = option(None, "Question column; null: prompt, question, messages or conversations.")
    answer_column: str = option("answer", "Column with the reference answer.")
    category_column: str | None = option(None, "Column with the category; null: category or subset, if present.")
    request: str | None = option(None, "Text appended to each question; null: chosen by answer_type.")
    system_prompt: str | None = option(None, "System message for each question (may be empty); null: none.")
    fps: float = option(1.0, "Video frames to read per second.", minimum=0.01)
    max_pixels: int | None = option(81920, "Maximum frame area in pixels; null: unlimited.", minimum=1)
    num_questions: int | None = option(None, "Number of questions, from the start of the file; null: all.", minimum=1)
    temperature: float = option(0.0, "Sampling temperature; 0: greedy.", minimum=0)
    seed: int = option(0, "Sampling seed; each question uses its own random numbers.", minimum=0)
    max_tokens: int = option(1024, "Maximum number of tokens per completion.", minimum=1)
    batch_size: int = option(8, "Questions per generation call; affects results only through rounding.", minimum=1)
    dtype: str | None = option(
        None, "Dtype for the weights; null: as in config.json.",
        choices=("float32", "bfloat16", "float16"),
    )  # fmt: skip
    device: str = option("auto", "auto: use the GPU if available.", choices=("auto", "cpu"))
    cluster: QuestionRanksConfig = option(QuestionRanksConfig(), "Ranks.")
    compare: PathText | None = option(None, "Folder with an earlier evaluation to compare against.")
    file_per_question: bool = option(False, "Also write <output_dir>/questions/<category>/<video or id>.json.")
    allow_mismatch: list[str] = option([], "Conditions that may differ from the evaluation in compare.")


@dataclass
class Question:
    """A question from a question file.

    Attributes:
        id: Value of the column ``id``, or the row number counted from 0.
        category: Category of the question, or the file name.
        messages, prompt: The question as messages (or as a string, to bypass the chat template), and as plain text.
    """

    id: str
    category: str
    messages: str | list[Message]
    prompt: str
    expected: str
    row: Row
    has_options: bool

    @property
    def media(self) -> list[tuple[str, Any]]:
        """Kind and value of every image and video."""
        video = self.row.get("video")
        return [("image", image) for image in images_of(self.row)] + ([("video", video)] if video else [])


def read_questions(config: QuestionsConfig) -> list[Question]:
    """Read a question file; raise ConfigError if it is missing, unsupported or empty, or a row is incomplete."""
    path = Path(config.questions).expanduser()
    rows = _read_rows(path)[: config.num_questions]
    if not rows:
        raise ConfigError(f"questions='{path}' has no rows; expected at least one. Set questions=<file>")
    questions: list[Question] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        with row_named(number, str(path)):
            question = _question(number, row, path, config)
        if question.id in seen:
            raise ConfigError(
                f"Rows {seen[question.id]} and {number} of {path} have the same id '{question.id}'; expected unique ids."
            )
        seen[question.id] = number
        questions.append(question)
    return questions


def _read_rows(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"questions is '{path}', which is not a file. Set questions=<file>")
    if path.suffix in KINDS:
        return list(stream_rows([path], KINDS[path.suffix]))
    if path.suffix != ".parquet":
        raise ConfigError(f"questions is '{path}'; expected a file with the suffix {' or '.join(SUFFIXES)}.")
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"questions='{path}' cannot be read as parquet ({error}).") from error


def _question(number: int, row: Any, path: Path, config: QuestionsConfig) -> Question:
    if not isinstance(row, Mapping):
        raise BadRowError(f"it is {row!r}; expected a map of columns to values.")
    row = dict(row)
    nested = row.get("qa_pairs")
    columns = {**row, **nested} if isinstance(nested, Mapping) else row
    options = _options(columns)
    reference = columns.get(config.answer_column)
    if reference is None or reference == "":
        hint = did_you_mean(config.answer_column, columns)
        raise BadRowError(f"it has no answer in the column '{config.answer_column}'.{hint} Set answer_column=<column>")
    references = reference if isinstance(reference, list) else [reference]
    references = [_reference_letter(item, options) for item in references] if options else references
    expected = as_reference(
        references if isinstance(reference, list) else references[0], f"its column '{config.answer_column}'"
    )
    candidates = PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)
    name = next((candidate for candidate in candidates if columns.get(candidate)), None)
    if name is None:
        hint = did_you_mean(candidates[0], columns)
        raise BadRowError(f"it has no question column {' or '.join(candidates)}.{hint} Set prompt_column=<column>")
    identity = number if row.get("id") is None else as_text(row["id"], "its column 'id'")
    content = scalar_text(columns[name], f"its column '{name}'")
    question = Question(str(identity), "", content, "", expected, row, bool(options))
    category = config.category_column
    names = ("category", "subset") if category is None else (category,)
    if category is not None and category not in row:
        raise BadRowError(f"it has no column '{category}'.{did_you_mean(category, row)} Set category_column=<column>")
    category = next((name for name in names if row.get(name) not in (None, "")), None)
    question.category = path.stem if category is None else as_text(row[category], f"its column '{category}'")
    _complete(question, options, config, is_raw=name == "prompt")
    return question


def _options(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the options by letter, empty for an open question."""
    given = columns.get("index2ans") or columns.get("options") or columns.get("choices")
    if given is None:
        return {}
    if isinstance(given, list) and len(given) <= len(LETTERS):
        given = dict(zip(LETTERS, given, strict=False))
    if not isinstance(given, Mapping) or any(len(letter) != 1 or letter not in LETTERS for letter in given):
        raise BadRowError(f"its options are {given!r}; expected a list, or a map of letters A to Z to texts.")
    # Parquet fills in the letters of all rows with nulls.
    return {letter: as_text(text, f"option {letter}") for letter, text in sorted(given.items()) if text is not None}


def _reference_letter(reference: Any, options: Mapping[str, str]) -> str:
    """Return the correct option's letter; the reference is the letter itself or an index counted from 0."""
    letters = list(options)
    # True is also an int, but not an index.
    is_number = isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(letters)
    letter = letters[reference] if is_number else str(reference).strip().upper()
    if letter not in options:
        raise BadRowError(f"its answer is {reference!r}; expected the letter of an option ({', '.join(letters)}).")
    return letter


def _complete(question: Question, options: dict[str, str], config: QuestionsConfig, is_raw: bool) -> None:
    """Add the options, the request, media and the system message to ``messages`` and ``prompt``."""
    request = config.request
    if request is None and options:
        request = LETTER_REQUEST if config.answer_type == LETTER else REASONING_REQUEST
    lines = [f"({letter}) {text}" for letter, text in options.items()]
    messages = question.messages
    if isinstance(messages, str):
        separator = "\n" if options else " "
        text = "\n".join([messages, *lines])
        text = f"{text}{separator}{request}" if request else text
        question.prompt = text
        is_plain = is_raw and not (options or question.media or system_of(question.row))
        if is_plain and config.system_prompt is None:
            question.messages = text
            return
        messages = [{"role": "user", "content": text}]
    else:
        messages = check_messages(messages)
        # A training file may end with the reference reply, which the model must not see.
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise BadRowError("it has only assistant messages and therefore no question.")
        ending = "\n".join([*lines, *([request] if request else [])])
        content = messages[-1].get("content")
        if ending and isinstance(content, list):
            messages[-1]["content"] = [*content, {"type": "text", "text": f" {ending}"}]
        elif ending:
            messages[-1]["content"] = f"{content} {ending}"
        question.prompt = "\n".join(_text_of(message.get("content")) for message in messages)
    _insert_media(question.media, messages, config)
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    question.messages = messages


def _insert_media(media: list[tuple[str, Any]], messages: list[Message], config: QuestionsConfig) -> None:
    """Convert image marks to message parts, and insert unreferenced images or the video before the last question."""
    has_images = any(kind == "image" for kind, _ in media)
    for message in messages:
        content = message["content"]
        if media and isinstance(content, str) and IMAGE_MARK in content:
            if not has_images:
                raise BadRowError(f"its question has {IMAGE_MARK}, but its columns have a video and no image; expected an image for "
                                  "each mark. A video needs no mark, because it is placed before the question.")  # fmt: skip
            message["content"] = text_parts(content, has_images)
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    has_image_parts = any(part.get("type") == "image" for part in parts)
    videos = [part.get("video") for part in parts if part.get("type") == "video"]
    missing = [_part(kind, value, config) for kind, value in media
               if not (has_image_parts if kind == "image" else value in videos)]  # fmt: skip
    if missing:
        text = [{"type": "text", "text": contents[-1]}] if isinstance(contents[-1], str) else contents[-1]
        messages[-1]["content"] = [*missing, *text]


def _part(kind: str, value: Any, config: QuestionsConfig) -> dict[str, Any]:
    if kind == "image":
        return {"type": "image"}  # refers to the next image of the column
    return {"type": "video", "video": value, "fps": config.fps, "max_pixels": config.max_pixels}


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content)


class QuestionPacker(ChatPacker):
    """Tokenizes questions. Media paths are relative to ``folder``, and prompts must be shorter than ``max_length``."""

    def __init__(self, folder: Path, max_length: int) -> None:
        self._folder, self._max_length = folder, max_length

    def prepare(self, processor: Any) -> None:
        """Set the tokenizer or processor. Without a chat template, questions are used as plain text."""
        config = RecipeConfig()
        config.policy.model_max_length = self._max_length
        config.train.train_policy.dataset.name = str(self._folder)
        self.has_template = bool(getattr(processor, "chat_template", None))
        if self.has_template:
            self.setup(config, processor)
        self.tokenizer, self.max_length = getattr(processor, "tokenizer", processor), self._max_length

    def question(self, question: Question) -> Prompt:
        """Tokenize a question; raise BadRowError if it is too long or its media are unsupported."""
        if isinstance(question.messages, str) or not self.has_template:
            if question.media:
                raise BadRowError("it has images or a video, but the model has no chat template that inserts them.")
            ids = text_tokens(self.tokenizer, question.prompt)
            self._check_length(len(ids))
            return Prompt(ids, {}, question.expected, question.row)
        return self.prompt({**question.row, "messages": question.messages, "answer": question.expected})

    def messages(self, row: Row) -> list[Message]:
        return row["messages"]

    def reference(self, row: Row) -> Any:
        return row["answer"]

    def check_media(self, question: Question) -> None:
        """Raise BadRowError if an image or video file is missing."""
        for kind, value in question.media:
            if isinstance(value, str) and not value.startswith("data:") and not (self._folder / value).is_file():
                raise BadRowError(f"its {kind} '{value}' does not exist in '{self._folder}'; expected a file there.")


def first_letter(completion: str) -> str | None:
    """Return the first capital letter A to Z anywhere in a text; for "The answer is B", this is T."""
    match = _LETTER.search(completion)
    return match[0] if match else None


def tagged_letter(completion: str) -> str | None:
    """Return the first capital letter A to Z within the first answer tags, or None without tags or letter."""
    tags = _TAGS.search(completion)
    return first_letter(tags[1]) if tags else None


def scoring(answer_type: str | None, has_options: bool) -> tuple[str, Reward, Callable[[str], str | None]]:
    """Return the answer type, the reward (1 for a correct completion), and the function that extracts a completion's answer.

    Raise ConfigError if ``answer_type`` is missing, unknown, or needs options that a question lacks (``has_options`` is False).
    """
    extractors = {LETTER: first_letter, REASONING: tagged_letter}
    answer_type = answer_type or (REASONING if has_options else None)
    known = [*extractors, *REWARDS]
    if answer_type not in known:
        problem = "is not given, and questions have no options" if answer_type is None else f"is '{answer_type}'"
        hint = did_you_mean(answer_type, known) if answer_type else ""
        raise ConfigError(
            f"answer_type {problem}; expected one of {', '.join(known)}.{hint} Set e.g. answer_type=gsm8k"
        )
    if answer_type not in extractors:
        return answer_type, REWARDS.get(answer_type), EXTRACTORS.get(answer_type, str.strip)
    if not has_options:
        raise ConfigError(
            f"answer_type is '{answer_type}', which needs options (index2ans, options or choices). Set answer_type=<reward>"
        )
    extract = extractors[answer_type]

    def is_correct(completion: str, reference: str | None, **row: object) -> float:
        return float(extract(completion) == reference)

    return answer_type, is_correct, extract
