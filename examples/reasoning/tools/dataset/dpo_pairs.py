"""Fine-tunes a language model on preferences by DPO.

    rlinf launch --config <recipe> tools/dataset/dpo_pairs.py train.train_policy.type=dpo

A row has a `prompt`, and two answers to it, `chosen` and `rejected`: texts, or lists of messages.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import ChatPacker


class PreferencePacker(ChatPacker):
    """Learns to prefer an answer to another."""

    def pair(self, row):
        """Return the chosen and the rejected answer, with the prompt before each. Change this for rows of another shape."""
        return super().pair(row)


if __name__ == "__main__":
    launch_worker(data_packer=PreferencePacker())
