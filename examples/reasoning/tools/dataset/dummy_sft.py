"""The shortest dataset script: raw text from the column `conversation`, regardless of the recipe's column.

    rlinf launch --config configs/mistral/mistral-7b-fsdp4-sft.toml tools/dataset/dummy_sft.py

raw_text_sft.py describes the trained tokens.
"""

from rlinf.recipes.launch_worker import launch_worker
from rlinf.recipes.packers import RawTextPacker

if __name__ == "__main__":
    launch_worker(data_packer=RawTextPacker(column="conversation"))
