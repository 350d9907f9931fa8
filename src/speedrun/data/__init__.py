"""Text becomes token shards, shards become batches.

pocket.py and encode.py make documents into tokens, fineweb.py fetches them -> shards.py keeps them -> loader.py packs
them into rows.
"""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

if TYPE_CHECKING:
    from speedrun.data import encode, fineweb, loader, pocket
    from speedrun.data.fineweb import load
    from speedrun.data.loader import Batch, Loader, LoaderConfig, Prefetcher
    from speedrun.data.shards import TokenFolder
    from speedrun.data.tokenizer import Tokenizer
else:
    __getattr__, __all__ = lazy(__name__)
