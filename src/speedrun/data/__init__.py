"""Text becomes token shards, shards become batches: corpus.py -> shards.py -> loader.py."""
