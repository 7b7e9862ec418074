"""A token per character, and two special tokens: padding, and the end of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PAD = 0
END = 1


@dataclass(frozen=True)
class CharTokenizer:
    """Token `2 + i` is `alphabet[i]`."""

    alphabet: str

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharTokenizer:
        """Return the tokenizer of all characters in `texts`."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def size(self) -> int:
        """The number of different tokens."""
        return 2 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. ValueError for a character outside the alphabet."""
        return [2 + self.alphabet.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to the first END. A PAD becomes the null character, which no right answer contains."""
        characters = []
        for token in tokens:
            if token == END:
                break
            characters.append("\0" if token == PAD else self.alphabet[token - 2])
        return "".join(characters)
