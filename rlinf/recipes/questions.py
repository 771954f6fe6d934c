"""Files of questions, multiple choice and exact answers: their rows as prompts, and what a completion answers."""

from __future__ import annotations

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
from rlinf.recipes.rewards import ANSWERS, REWARDS, Reward
from rlinf.recipes.row_files import KINDS, as_answer, as_text, scalar_text, stream_rows
from rlinf.recipes.samples import BadRowError, Prompt

SUFFIXES = (*KINDS, ".parquet")
LETTER, REASONING = "letter", "reasoning"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPT_COLUMNS = ("prompt", "question", "messages", "conversations")
LETTER_REQUEST = "Answer with the letter of the option only."
REASONING_REQUEST = (
    "Answer with the letter of the option. First write your thoughts, then the answer, with an empty line between them, like this:\n"
    "<think>\nyour thoughts\n</think>\n\n<answer>\nthe letter\n</answer>"
)
"""That of ``examples/reasoning/tools/dataset/cosmos_grpo.py``."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LETTER = re.compile("[A-Z]")


@dataclass
class QuestionRanksConfig:
    """The processes of an evaluation on questions."""

    num_processes: int | None = option(
        None, "Ranks that share the questions; null: one, or those that torchrun or srun has started.", minimum=1
    )
    num_threads: int | None = option(
        None, "CPU threads per rank; null: OMP_NUM_THREADS, or all cores divided by the ranks of a machine.", minimum=1
    )
    deadlines: DeadlinesConfig = option(
        DeadlinesConfig(), "Seconds that the ranks may wait; an evaluation uses start, evaluate and save."
    )


@dataclass
class QuestionsConfig:
    """Keys of ``rlinf evaluate questions=...``."""

    checkpoint: PathText = option(
        "", "Folder or hub id of a model, folder of a recipe's run, or latest: the newest run below outputs/."
    )
    questions: PathText = option("", "File of questions: jsonl, json, csv, tsv or parquet.")
    output_dir: PathText | None = option(
        None, "Folder of the result; null: eval/<file> in the run, or for another model outputs/questions/<time>."
    )
    answer_type: str | None = option(
        None,
        "letter: the first capital letter anywhere; reasoning: the first one within the answer tags; or a reward, such as gsm8k, that "
        "is 1 for a right answer. null: reasoning for questions with options.",
    )
    prompt_column: str | None = option(
        None,
        "Column of the questions: a text or messages; null: the first of prompt, question, messages, conversations.",
    )
    answer_column: str = option("answer", "Column of the right answer.")
    category_column: str | None = option(
        None, "Column by which accuracies are listed; null: category or subset, if there is one."
    )
    request: str | None = option(None, "Text after each question; null: none, or for options what answer_type needs.")
    system_prompt: str | None = option(None, "Message before each question, which may be empty; null: none.")
    fps: float = option(1.0, "Frames of a second of video that the model reads.", minimum=0.01)
    max_pixels: int | None = option(81920, "Larger frames are scaled down to this area; null: as they are.", minimum=1)
    num_questions: int | None = option(None, "First questions of the file; null: all.", minimum=1)
    temperature: float = option(0.0, "0: the most likely tokens; else the temperature of the sampling.", minimum=0)
    seed: int = option(0, "Seed of the sampling; each question has its own random numbers.", minimum=0)
    max_tokens: int = option(1024, "Most tokens of a completion.", minimum=1)
    batch_size: int = option(8, "Questions of one call of the model; changes results by rounding only.", minimum=1)
    dtype: str | None = option(
        None, "Number format of the weights; null: as in the model's config.json.",
        choices=("float32", "bfloat16", "float16"),
    )  # fmt: skip
    device: str = option("auto", "auto: a GPU if there is one.", choices=("auto", "cpu"))
    cluster: QuestionRanksConfig = option(QuestionRanksConfig(), "Ranks.")
    compare: PathText | None = option(None, "Folder of an earlier evaluation on the same questions, to compare with.")
    file_per_question: bool = option(
        False, "Also write <output_dir>/questions/<category>/<video or id>.json, each with is_correct."
    )
    allow_mismatch: list[str] = option([], "Conditions in which the two of compare may differ.")


@dataclass
class Question:
    """One row of a file.

    Attributes:
        id: Value of the column ``id``, or the row number from 0.
        category: For the table; the name of the file without any.
        messages: The question, as messages; a text that no chat template changes is a string.
        prompt: The same as plain text.
    """

    id: str
    category: str
    messages: str | list[dict[str, Any]]
    prompt: str
    expected: str
    row: dict[str, Any]
    has_options: bool

    @property
    def media(self) -> list[tuple[str, Any]]:
        """Kind and value of each image and video."""
        video = self.row.get("video")
        return [("image", image) for image in images_of(self.row)] + ([("video", video)] if video else [])


def read_questions(config: QuestionsConfig) -> list[Question]:
    """Read and check a file of questions.

    Raise ConfigError if the file is missing, not of a known kind or empty, or a row lacks a question or an answer.
    """
    path = Path(config.questions).expanduser()
    rows = _read_rows(path)[: config.num_questions]
    if not rows:
        raise ConfigError(f"questions='{path}' has no rows; required: one or more. Set questions=<file>")
    found: list[Question] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        try:
            question = _question(number, row, path, config)
        except BadRowError as error:
            raise ConfigError(f"Row {number} of {path}: {error.reason}") from None
        if question.id in seen:
            raise ConfigError(
                f"Rows {seen[question.id]} and {number} of {path} have the same id '{question.id}'; required: different ones."
            )
        seen[question.id] = number
        found.append(question)
    return found


def _read_rows(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"questions is '{path}', which is not a file. Set questions=<file>")
    if path.suffix in KINDS:
        return list(stream_rows([path], KINDS[path.suffix]))
    if path.suffix != ".parquet":
        raise ConfigError(f"questions is '{path}'; required: a file that ends with {', '.join(SUFFIXES)}.")
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"questions='{path}' cannot be read as parquet ({error}).") from error


def _question(number: int, row: Any, path: Path, config: QuestionsConfig) -> Question:
    if not isinstance(row, Mapping):
        raise BadRowError(f"it is {row!r}; required: columns and their values.")
    row = dict(row)
    nested = row.get("qa_pairs")
    asked = {**row, **nested} if isinstance(nested, Mapping) else row
    options = _options(asked)
    answer = asked.get(config.answer_column)
    if answer is None or answer == "":
        hint = did_you_mean(config.answer_column, asked)
        raise BadRowError(f"it has no answer in the column '{config.answer_column}'.{hint} Set answer_column=<column>")
    right = answer if isinstance(answer, list) else [answer]
    right = [_right_letter(each, options) for each in right] if options else right
    expected = as_answer(right if isinstance(answer, list) else right[0], f"its column '{config.answer_column}'")
    columns = PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)
    name = next((each for each in columns if asked.get(each)), None)
    if name is None:
        hint = did_you_mean(columns[0], asked)
        raise BadRowError(f"it has no question in the column {' or '.join(columns)}.{hint} Set prompt_column=<column>")
    identity = number if row.get("id") is None else as_text(row["id"], "its column 'id'")
    asks = scalar_text(asked[name], f"its column '{name}'")
    question = Question(str(identity), "", asks, "", expected, row, bool(options))
    category = config.category_column
    names = ("category", "subset") if category is None else (category,)
    if category is not None and category not in row:
        raise BadRowError(f"it has no column '{category}'.{did_you_mean(category, row)} Set category_column=<column>")
    filled = next((each for each in names if row.get(each) not in (None, "")), None)
    question.category = path.stem if filled is None else as_text(row[filled], f"its column '{filled}'")
    _ask(question, options, config, is_raw=name == "prompt")
    return question


def _options(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return the options by letter; none for a question without."""
    given = asked.get("index2ans") or asked.get("options") or asked.get("choices")
    if given is None:
        return {}
    if isinstance(given, list) and len(given) <= len(LETTERS):
        given = dict(zip(LETTERS, given, strict=False))
    if not isinstance(given, Mapping) or any(len(letter) != 1 or letter not in LETTERS for letter in given):
        raise BadRowError(f"its options are {given!r}; required: a list, or texts by their letters A to Z.")
    # A parquet file gives every row the letters of all rows.
    return {letter: as_text(text, f"option {letter}") for letter, text in sorted(given.items()) if text is not None}


def _right_letter(answer: Any, options: Mapping[str, str]) -> str:
    """Return the letter of the right option, given as letter or as number from 0."""
    letters = list(options)
    is_number = isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters)
    letter = letters[answer] if is_number else str(answer).strip().upper()
    if letter not in options:
        raise BadRowError(f"its answer is {answer!r}; required: the letter of an option ({', '.join(letters)}).")
    return letter


def _ask(question: Question, options: dict[str, str], config: QuestionsConfig, is_raw: bool) -> None:
    """Complete ``messages`` and ``prompt`` by options, request, media and system message."""
    request = config.request
    if request is None and options:
        request = LETTER_REQUEST if config.answer_type == LETTER else REASONING_REQUEST
    lines = [f"({letter}) {text}" for letter, text in options.items()]
    asked = question.messages
    if isinstance(asked, str):
        separator = "\n" if options else " "
        text = "\n".join([asked, *lines])
        text = f"{text}{separator}{request}" if request else text
        question.prompt = text
        is_plain = is_raw and not (options or question.media or system_of(question.row))
        if is_plain and config.system_prompt is None:
            question.messages = text
            return
        asked = [{"role": "user", "content": text}]
    else:
        asked = check_messages(asked)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            raise BadRowError("its messages hold no question, only answers.")
        ending = "\n".join([*lines, *([request] if request else [])])
        content = asked[-1].get("content")
        if ending and isinstance(content, list):
            asked[-1]["content"] = [*content, {"type": "text", "text": f" {ending}"}]
        elif ending:
            asked[-1]["content"] = f"{content} {ending}"
        question.prompt = "\n".join(_text_of(each.get("content")) for each in asked)
    _place(question.media, asked, config)
    if config.system_prompt is not None:
        asked.insert(0, {"role": "system", "content": config.system_prompt})
    question.messages = asked


def _place(media: list[tuple[str, Any]], asked: list[dict[str, Any]], config: QuestionsConfig) -> None:
    """Turn marks into parts of messages, and put images or the video before the last question if no part names them."""
    has_images = any(kind == "image" for kind, _ in media)
    for message in asked:
        content = message["content"]
        if media and isinstance(content, str) and IMAGE_MARK in content:
            if not has_images:
                raise BadRowError(f"its question has {IMAGE_MARK}, and its columns have a video and no image; required: an image for "
                                  "each mark. A video needs no mark, it comes before the question.")  # fmt: skip
            message["content"] = text_parts(content, has_images)
    contents = [message["content"] for message in asked]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    names_images = any(part.get("type") == "image" for part in parts)
    videos = [part.get("video") for part in parts if part.get("type") == "video"]
    missing = [_part(kind, value, config) for kind, value in media
               if not (names_images if kind == "image" else value in videos)]  # fmt: skip
    if missing:
        text = [{"type": "text", "text": contents[-1]}] if isinstance(contents[-1], str) else contents[-1]
        asked[-1]["content"] = [*missing, *text]


def _part(kind: str, value: Any, config: QuestionsConfig) -> dict[str, Any]:
    if kind == "image":
        return {"type": "image"}  # the next one of the column
    return {"type": "video", "video": value, "fps": config.fps, "max_pixels": config.max_pixels}


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content)


class QuestionPacker(ChatPacker):
    """Turns questions into the tokens that a model reads.

    Args:
        folder: Where paths of images and videos start.
        max_length: Most tokens of a prompt; required: fewer.
    """

    def __init__(self, folder: Path, max_length: int) -> None:
        self._folder, self._max_length = folder, max_length

    def prepare(self, processor: Any) -> None:
        """Take the tokenizer or the processor. Without a chat template, a question is read as plain text."""
        config = RecipeConfig()
        config.policy.model_max_length = self._max_length
        config.train.train_policy.dataset.name = str(self._folder)
        self.has_template = bool(getattr(processor, "chat_template", None))
        if self.has_template:
            self.setup(config, processor)
        self.tokenizer, self.max_length = getattr(processor, "tokenizer", processor), self._max_length

    def question(self, question: Question) -> Prompt:
        """Return the tokens of a question; raise BadRowError if it cannot be asked."""
        if isinstance(question.messages, str) or not self.has_template:
            if question.media:
                raise BadRowError("it has images or a video, and the model has no chat template that places them.")
            ids = text_tokens(self.tokenizer, question.prompt)
            self._check_length(len(ids))
            return Prompt(ids, {}, question.expected, question.row)
        return self.prompt({**question.row, "messages": question.messages, "answer": question.expected})

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return row["messages"]

    def reference(self, row: dict[str, Any]) -> Any:
        return row["answer"]

    def check_media(self, question: Question) -> None:
        """Raise BadRowError if an image or the video of a question is not there."""
        for kind, value in question.media:
            if isinstance(value, str) and not value.startswith("data:") and not (self._folder / value).is_file():
                raise BadRowError(f"its {kind} '{value}' does not exist in '{self._folder}'; required: a file there.")


def first_letter(completion: str) -> str | None:
    """Return the first letter A to Z anywhere in a text; "The answer is B" answers T."""
    match = _LETTER.search(completion)
    return match[0] if match else None


def tagged_letter(completion: str) -> str | None:
    """Return the first letter A to Z within the first answer tags; None without tags or letter."""
    tags = _TAGS.search(completion)
    return first_letter(tags[1]) if tags else None


def scoring(answer_type: str | None, has_options: bool) -> tuple[str, Reward, Callable[[str], str | None]]:
    """Return how answers are judged. Raise ConfigError if ``answer_type`` is missing, unknown, or needs options.

    The result is the name, a reward that is 1 for a right completion, and a function that finds the answer in a
    completion.

    Args:
        has_options: All questions have options.
    """
    finders = {LETTER: first_letter, REASONING: tagged_letter}
    answer_type = answer_type or (REASONING if has_options else None)
    known = [*finders, *REWARDS]
    if answer_type not in known:
        found = "is not given, and questions have no options" if answer_type is None else f"is '{answer_type}'"
        hint = did_you_mean(answer_type, known) if answer_type else ""
        raise ConfigError(f"answer_type {found}; required: one of {', '.join(known)}.{hint} Set e.g. answer_type=gsm8k")
    if answer_type not in finders:
        return answer_type, REWARDS.get(answer_type), ANSWERS.get(answer_type, str.strip)
    if not has_options:
        raise ConfigError(
            f"answer_type is '{answer_type}', which needs options (index2ans, options or choices). Set answer_type=<reward>"
        )
    find = finders[answer_type]

    def is_right(completion: str, reference: str | None, **row: Any) -> float:
        return float(find(completion) == reference)

    return answer_type, is_right, find
