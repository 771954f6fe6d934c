"""Supervised fine-tuning of a vision-language model on conversations about images.

    rlinf launch --config configs/gemma/gemma3-12b-vlm-fsdp4-sft.toml tools/dataset/hf_vlm_sft.py

A row has `messages`, whose contents are lists of parts `{type: image}` and `{type: text, text: ...}`, and their `images` in order.
Only the assistant's messages are trained, not prompts and images. Your own data, without the hub: a folder with a file

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
                  {"role": "assistant", "content": "A cup."}], "images": ["cup.png"]}

of one such line per row, and train.train_policy.dataset.name=<the file>.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import ChatPacker


class ImageChatPacker(ChatPacker):
    """Returns the conversation of a row; ``ChatPacker`` finds its images and the trained tokens."""

    def messages(self, row):
        """Return the messages of a row. Change this for rows of a different layout."""
        return super().messages(row)


if __name__ == "__main__":
    launch_worker(data_packer=ImageChatPacker())
