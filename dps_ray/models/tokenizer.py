"""A small byte-level BPE tokenizer with a chat template, trained in milliseconds."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""Special tokens, in id order from 0."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = """
A server answers many requests at once. Each request keeps its keys and values in memory until the
last token is written, so memory fills as conversations grow longer and more people arrive. When a
burst comes, the scheduler must choose: refuse new work, pause old work, or find more room. Half of
every weight can be set aside and copied back later, because the upper byte alone still gives useful
answers. The quick brown fox jumps over the lazy dog while seven wizards quietly mix a box of jugs.
Numbers such as 0, 1, 23, 456 and 7890 appear in logs; functions return values; users ask questions,
and assistants explain the weather, history, mathematics, cooking, travel, music and programming.
def measure(batch): return sum(step.time for step in batch) / max(1, len(batch))
"""


def write_tokenizer(folder: Path, *, vocab_size: int, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with exactly ``vocab_size`` tokens.

    Raises
    ------
    ValueError
        The training text is too short for so many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the training text yields only "
            f"{tokenizer.get_vocab_size()} tokens: lower vocab_size or lengthen the text"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
