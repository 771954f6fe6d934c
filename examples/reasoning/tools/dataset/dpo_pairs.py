"""DPO of a language model on preference pairs.

    rlinf launch --config <recipe> tools/dataset/dpo_pairs.py train.train_policy.type=dpo

A row has a `prompt` and two completions, `chosen` and `rejected`: texts, or lists of messages.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import ChatPacker


class PreferencePacker(ChatPacker):
    """Builds the preference pair of a row."""

    def pair(self, row):
        """Return the chosen and the rejected completion, each after the prompt. Change this for rows of a different layout."""
        return super().pair(row)


if __name__ == "__main__":
    launch_worker(data_packer=PreferencePacker())
