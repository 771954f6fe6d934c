"""Trains the small tokenizer for models trained from scratch: byte-level BPE with 512 tokens, on robot instructions.

Run from the project folder: ``python scripts/make_tiny_tokenizer.py``. The result is deterministic.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
OUTPUT = Path(__file__).parents[1] / "rlinf/models/embodiment/assets/tiny_tokenizer"

COLOURS = ["red", "green", "blue", "yellow", "orange", "purple", "white", "black", "grey", "pink", "brown", "cyan"]
THINGS = ["block", "cube", "ball", "bowl", "plate", "cup", "mug", "can", "bottle", "box", "drawer", "cylinder"]
PLACES = ["zone", "area", "basket", "tray", "plate", "bin", "shelf", "table", "bowl", "drawer", "cabinet", "target"]
SIDES = ["left", "right", "front", "back", "top", "bottom", "middle", "near", "far"]
TEMPLATES = [
    "reach the {colour} {thing}",
    "touch the {colour} {thing}",
    "go to the {colour} {thing}",
    "move to the {colour} {place}",
    "push the {colour} {thing} to the {other} {place}",
    "push the {colour} {thing} into the {other} {place}",
    "push the {colour} {thing} to the {side}",
    "pick up the {colour} {thing}",
    "pick the {colour} {thing} and place it in the {other} {place}",
    "pick up the {colour} {thing} and place it on the {other} {place}",
    "put the {colour} {thing} on top of the {other} {thing}",
    "put both the {colour} {thing} and the {other} {thing} in the {place}",
    "place the {thing} next to the {other} {thing}",
    "stack the {colour} {thing} on the {other} {thing}",
    "lift the {colour} {thing}",
    "slide the {colour} {thing} towards the {side}",
    "open the {side} {place}",
    "close the {side} {place}",
    "turn on the {thing}",
    "turn off the {thing}",
    "press the {colour} button",
    "grasp the {thing} between the {colour} {thing} and the {place}",
    "first touch the {colour} {thing}, then the {other} {thing}",
    "touch the {colour} {thing} and then go to the {other} {place}",
    "move away from the {colour} {thing}",
    "hold the {thing} and wait",
    "rotate the {colour} {thing} clockwise",
]


def sentences() -> list[str]:
    """Return the training texts in a fixed order."""
    words = zip(
        itertools.cycle(COLOURS), itertools.cycle(THINGS), itertools.cycle(PLACES), itertools.cycle(SIDES), strict=False
    )
    result = []
    for template in TEMPLATES:
        for index, (colour, thing, place, side) in enumerate(itertools.islice(words, 120)):
            other = COLOURS[(COLOURS.index(colour) + 1 + index) % len(COLOURS)]
            place = PLACES[(PLACES.index(place) + index // 12) % len(PLACES)]
            thing = THINGS[(THINGS.index(thing) + index // 12) % len(THINGS)]
            result.append(template.format(colour=colour, other=other, thing=thing, place=place, side=side))
    return result


def main() -> None:
    """Train the tokenizer and write it to the package."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(OUTPUT))
    print(f"{len(fast)} tokens in {OUTPUT.relative_to(Path.cwd())}")
    for text in (
        "reach the red block",
        "push the blue block to the green zone",
        "touch the red block, then the blue block",
    ):
        print(fast.tokenize(text))


if __name__ == "__main__":
    main()
