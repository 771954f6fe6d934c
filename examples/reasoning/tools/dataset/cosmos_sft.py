"""Supervised fine-tuning of a vision-language model on conversations about videos, in the layout of Cosmos-Reason1.

    rlinf launch --config configs/cosmos-reason1-7b-fsdp2-sft.toml tools/dataset/cosmos_sft.py

A row has `conversations` (system, user, assistant) and a `video`, which is looked up by its name in the dataset's folder and in
$COSMOS_CACHE. One frame per second is an image of the prompt.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import ChatPacker, column

FPS = 1
MAX_PIXELS = 81920  # of a frame


class CosmosPacker(ChatPacker):
    """Puts the video of a row before the user's text."""

    def messages(self, row):
        """Return the conversation with its video."""
        video = {"type": "video", "video": column(row, "video"), "fps": FPS, "max_pixels": MAX_PIXELS}
        messages = []
        for message in super().messages(row):
            if message["role"] == "user":
                message = {"role": "user", "content": [video, {"type": "text", "text": message["content"]}]}
            messages.append(message)
        return messages


if __name__ == "__main__":
    launch_worker(data_packer=CosmosPacker())
