"""A tokenizer of single letters, and sums to train a tiny language model on."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf.recipes.samples import Prompt, Sample

LETTERS = ["<pad>", "<s>", "</s>", *"0123456789+= "]


def add_tokenizer(folder: str) -> str:
    """Write the tokenizer into the folder of a model of at least as many tokens, and return the folder."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


class Sums:
    """Packs sums of two digits."""

    def setup(self, config, processor):
        self.tokenizer = processor

    def sample(self, row, answer="answer"):
        question, answer = (self.tokenizer(row[key])["input_ids"] for key in ("question", answer))
        return Sample(question + answer + [2], [False] * len(question) + [True] * (len(answer) + 1))

    def pair(self, row):
        return self.sample(row), self.sample(row, "wrong")

    def prompt(self, row):
        return Prompt(self.tokenizer(row["question"])["input_ids"], {}, row["answer"], row)


ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b), "wrong": str(a * b)} for a in range(8) for b in range(5)]
