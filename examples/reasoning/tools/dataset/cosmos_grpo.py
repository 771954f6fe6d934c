"""GRPO of a vision-language model on multiple-choice questions about videos, in the layout of Cosmos-Reason1.

    rlinf launch --config configs/cosmos-reason1-7b-p-fsdp2-r-tp2-grpo.toml tools/dataset/cosmos_grpo.py

A row has `qa_pairs` (question, index2ans: options by letter, answer: a letter) and a `video`; see cosmos_sft.py. The recipe's rewards
are single_choice (correct letter) and format (thoughts, two newlines, answer).
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import ChatPacker, column

FPS = 1
MAX_PIXELS = 81920  # of a frame
REQUEST = (
    "Answer with the letter of the option. First write your thoughts, then the answer, with an empty line between them, like this:\n"
    "<think>\nyour thoughts\n</think>\n\n<answer>\nthe letter\n</answer>"
)


class CosmosChoicePacker(ChatPacker):
    """Builds the prompt of a row: question, options and video."""

    def messages(self, row):
        """Return the prompt."""
        pair = column(row, "qa_pairs")
        options = [f"({letter}) {text}" for letter, text in sorted(pair["index2ans"].items()) if text is not None]
        video = {"type": "video", "video": column(row, "video"), "fps": FPS, "max_pixels": MAX_PIXELS}
        text = "\n".join([pair["question"], *options, REQUEST])
        return [
            {"role": "system", "content": ""},
            {"role": "user", "content": [video, {"type": "text", "text": text}]},
        ]

    def reference(self, row):
        """Return the letter of the correct option."""
        return column(row, "qa_pairs")["answer"]


if __name__ == "__main__":
    launch_worker(data_packer=CosmosChoicePacker())
