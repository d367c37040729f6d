"""A tokenizer.json whose token ids are bytes: id = byte, and four special tokens after them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tasuki.convert.random_llama import write_json

BOS, EOS, TURN_BEGIN, TURN_END = "<|bos|>", "<|eos|>", "<|turn|>", "<|end|>"
SPECIAL = (BOS, EOS, TURN_BEGIN, TURN_END)
VOCAB_SIZE = 256 + len(SPECIAL)
BOS_ID, EOS_ID, TURN_END_ID = 256, 257, 259

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def write_byte_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with a chat template, into `directory`."""
    vocab = {symbol: byte for byte, symbol in enumerate(_symbols())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies, by byte.

    Printable bytes stand for themselves; the others take the characters from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
