"""Seeded prompts of a wanted length, all different so that no prefix cache helps."""

import random
from typing import Literal, Protocol

PromptKind = Literal["ids", "words"]

WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(WORD_LIST.split())
"""Common nouns: about one token each in the vocabularies of current models."""


class PromptMaker(Protocol):
    """Makes the prompt of one request."""

    def __call__(self, index: int, tokens: int) -> str | list[int]: ...


def token_id_prompts(seed: int, low: int = 100, high: int = 500) -> PromptMaker:
    """Prompts of exactly the wanted number of tokens, as token ids in ``[low, high)``.

    The default range lies inside the vocabulary of every model with 500 tokens or more. Needs a
    server that takes ids, as vLLM and SGLang do.
    """

    def make(index: int, tokens: int) -> list[int]:
        generator = random.Random(f"{seed}:{index}")
        return [generator.randrange(low, high) for _ in range(tokens)]

    return make


def word_prompts(seed: int) -> PromptMaker:
    """Prompts of the wanted number of words, for servers that take text only.

    The token count is then near the wanted one; reports use the server's own count.
    """

    def make(index: int, tokens: int) -> str:
        generator = random.Random(f"{seed}:{index}")
        return " ".join(generator.choice(WORDS) for _ in range(tokens))

    return make


def prompt_maker(kind: PromptKind, seed: int) -> PromptMaker:
    """Choose a maker by its name on the command line."""
    return token_id_prompts(seed) if kind == "ids" else word_prompts(seed)
