"""Prompts of a known number of tokens, for any tokenizer.

A word repeated costs the same number of tokens each time, and the chat template costs a constant, so the token counts
that the server reports for two short requests give both.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

WORD = "hello"
SHORT, LONGER = 16, 48


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a prompt of a deployment has. :ivar word: per word. :ivar template: for all that is around."""

    word: int
    template: int

    def words_for(self, tokens: int) -> int:
        """The most words whose prompt has at most so many tokens; one word is the least."""
        return max(1, (tokens - self.template) // self.word)

    def tokens_of(self, words: int) -> int:
        """Length of the prompt of so many words, chat template included."""
        return self.template + self.word * words


def text(words: int, opening: str = "") -> str:
    """The prompt of so many words. :param opening: what comes first, so that it is no beginning of another prompt."""
    return " ".join([*([opening] if opening else []), *[WORD] * words])


def measured(count: Callable[[int], int], *, small: bool = False) -> Lengths:
    """Find out what a word and the template cost.

    :param count: tokens of the prompt of so many words, as the server counts them.
    :param small: by prompts of a third of the usual length, for a context of a few hundred tokens.
    :raises ValueError: no number of tokens per word explains the counts.
    """
    words = (SHORT // 3, LONGER // 3) if small else (SHORT, LONGER)
    short, longer = (count(number) for number in words)
    word, rest = divmod(longer - short, words[1] - words[0])
    if rest or word < 1:
        raise ValueError(
            f"prompts of {words[0]} and {words[1]} equal words were counted as {short} and {longer} tokens, which no"
            " number of tokens per word explains: were they cut?"
        )
    return Lengths(word=word, template=short - word * words[0])
