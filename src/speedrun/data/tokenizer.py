"""Text to token ids and back: a thin layer over the `tokenizers` library.

What it adds is one promise: text never turns into the document separator. Somebody may train on a file that
contains the words `<|endoftext|>`; these become ordinary tokens, and only our own code puts the separator
(`bos`, in front of each document) into a stream.

`Tokenizer.load("pocket")` is the byte-level BPE of the pocket track: 4096 entries, kept in the package, made by
`scripts/train_pocket_bpe.py`. `Tokenizer.load("gpt2")` is GPT-2's, fetched once (gpt2.py). Any other name is the path
of a `tokenizer.json`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from speedrun.data import gpt2
from speedrun.errors import UserError, nearest
from speedrun.files import write_atomic

SEPARATOR = gpt2.SEPARATOR

# The tokenizers that have a name, and where their tokenizer.json is, or is made.
NAMED: dict[str, Callable[[], Path]] = {
    "pocket": lambda: Path(__file__).with_name("pocket_bpe.json"),
    "gpt2": gpt2.prepare,
}

# What the common families of tokenizers call the token that opens a document, in order of preference.
SEPARATORS = (SEPARATOR, "<|begin_of_text|>", "<bos>", "<s>", "<|bos|>", "[BOS]", "[CLS]")


class Tokenizer:
    """`encode` never adds a separator and never yields a special id; `decode` is its inverse."""

    def __init__(self, content: str, name: str) -> None:
        """content: what a `tokenizer.json` holds."""
        try:
            inner = tokenizers.Tokenizer.from_str(content)
        except Exception as e:  # the library raises plain Exception for a malformed file
            raise UserError(f"{name} is not a tokenizer.json of the `tokenizers` library: {e}.") from None
        self.name = name
        self.content = content
        self._inner = inner
        self._separator = next((t for t in SEPARATORS if inner.token_to_id(t) is not None), None)
        inner.encode_special_tokens = True  # special tokens that appear in a text are text
        if self._separator:
            inner.add_special_tokens([self._separator])  # some files list it, but not as special
        inner.no_truncation()
        inner.no_padding()

    @classmethod
    def load(cls, path_or_name: str | Path) -> "Tokenizer":
        name = str(path_or_name)
        path = NAMED[name]() if name in NAMED else Path(name).expanduser()
        try:
            content = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"There is no tokenizer {name!r}: neither a file nor a known name.{nearest(name, NAMED)}"
            ) from None
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"The tokenizer {name} cannot be read: {e}.") from None
        return cls(content, name)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: what an embedding table must hold."""
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        return max(vocabulary.values()) + 1 if vocabulary else 0

    @cached_property
    def bos(self) -> int:
        found = None if self._separator is None else self._inner.token_to_id(self._separator)
        if found is None:
            raise UserError(f"The tokenizer {self.name} has no token that opens a document; add {SEPARATOR} to it.")
        return found

    def encode(self, text: str) -> list[int]:
        return self._without_separator(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._without_separator(e.ids) for e in encoded]

    def _without_separator(self, ids: list[int]) -> list[int]:
        """Keep the promise even for a vocabulary that spells the separator with itself, which byte-level BPE cannot."""
        if self._separator is not None and self.bos in ids:
            raise UserError(
                f"The tokenizer {self.name} turns the text {self._separator!r} into a separator; use another."
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Separators appear as their name, so that a reader sees where a document begins."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """The very file it was loaded from, so that its sha256 does not depend on the library's version."""
        write_atomic(path, self.content)
