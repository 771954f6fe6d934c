"""Supervised fine-tuning of a language model on conversations as raw text, without its chat template.

    rlinf launch --config configs/mistral/mistral-7b-fsdp4-sft.toml tools/dataset/raw_text_sft.py

A conversation becomes one line `role: content` per message; a text is not changed. Every token is trained. Roles may have any order,
which the chat templates of some models, such as Mistral's, reject.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import RawTextPacker

if __name__ == "__main__":
    # The column is that of the recipe: train.train_policy.conversation_column_name.
    launch_worker(data_packer=RawTextPacker())
