"""A model of your own text: encode it, train a small GPT on it, and let it write.

    python examples/own_text.py book.txt notes/ --steps 300 --out my-text

The folder gets the tokens and the run; `speedrun sample my-text/run` writes more, `speedrun report my-text/run` draws
its curves. The losses of other texts are of other tokens: compare those of the same folder alone.
"""

import argparse
import sys
from pathlib import Path

import speedrun
from speedrun.data.encode import encode_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", type=Path, help="text files, .jsonl files with a text field, or folders")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("my-text"))
    args = parser.parse_args()

    tokens = encode_files(args.text, args.out / "tokens", "pocket", val_fraction=0.1)
    run = speedrun.train("normuon", data=tokens.path, steps=args.steps, out=args.out / "run")
    print(f"{args.steps} steps  validation loss {run.result.val_loss:.4f}")
    print(run.generate("The", tokens=60))


if __name__ == "__main__":
    try:
        main()
    except speedrun.UserError as e:
        print(f"{Path(__file__).name}: {e}", file=sys.stderr)
        sys.exit(2)
