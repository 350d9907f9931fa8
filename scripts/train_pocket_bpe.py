"""Train the tokenizer of the pocket track and write it into the package. It was run once; its result is kept.

    python scripts/train_pocket_bpe.py [--check]

The merges come from the `train` documents alone, so that `val` and `shadow` stay unseen. The result depends only
on the documents and on the settings below: a second run gives the same bytes, which `--check` makes sure of.
"""

import argparse
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from speedrun.data import pocket
from speedrun.data.tokenizer import NAMED, SEPARATOR
from speedrun.files import write_atomic

VOCABULARY = 4096


def train(documents: list[str]) -> str:
    """The content of a tokenizer.json: byte-level BPE, the separator is id 0, then come bytes and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert tokenizer.token_to_id(SEPARATOR) == 0
    return tokenizer.to_str(pretty=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the package's file differs")
    arguments = parser.parse_args()
    content = train(pocket.split_corpus(pocket.read_books(pocket.fetch(print)))["train"])
    path = NAMED["pocket"]()
    if arguments.check:
        same = path.read_text(encoding="utf-8") == content
        print(f"{path} is {'what this script makes' if same else 'NOT what this script makes'}")
        sys.exit(0 if same else 1)
    write_atomic(path, content)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
