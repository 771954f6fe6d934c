"""GRPO of a language model on word problems, with a reward for the correct number.

    rlinf launch --config configs/phi/phi4-14b-p-fsdp4-r-tp2-grpo.toml tools/dataset/gsm8k_grpo.py

A row has a `question` and an `answer` that ends with `#### ` and the number.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import ChatPacker, column

REQUEST = 'Think step by step, and write the final answer after "#### ".'


class Gsm8kPacker(ChatPacker):
    """Builds the prompt of a row."""

    def messages(self, row):
        """Return the prompt."""
        return [{"role": "user", "content": f"{column(row, 'question')} {REQUEST}"}]

    def reference(self, row):
        """Return the text with the correct answer, for the reward."""
        return column(row, "answer")


if __name__ == "__main__":
    # reward_fns=... would replace the recipe's train.train_policy.reward_function, which is gsm8k.
    launch_worker(data_packer=Gsm8kPacker())
