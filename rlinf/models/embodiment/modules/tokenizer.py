"""Load the tokenizer of a checkpoint folder, or the packaged one."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rlinf.errors import ConfigError

TINY_TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny_tokenizer"


def load_tokenizer(path: str | None, vocab_size: int) -> Any:
    """Load a folder's tokenizer, or the packaged tiny one if ``path`` is None; it pads on the left."""
    folder = str(TINY_TOKENIZER) if path is None else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{folder}' contains no tokenizer that can be loaded ({str(error).splitlines()[0]}); many public checkpoints "
            "lack one and only name the language model whose tokenizer they use. Set tokenizer.tokenizer_model=<its folder>"
        ) from error
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"The tokenizer in '{folder}' has {len(tokenizer)} tokens, but the model's vocabulary has {vocab_size}. "
            "Set tokenizer.tokenizer_model=<the model's own tokenizer>"
        )
    return tokenizer
