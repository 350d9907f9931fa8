"""Text becomes token shards, shards become batches.

pocket.py and encode.py make documents into tokens, fineweb.py fetches them -> shards.py keeps them -> loader.py packs
them into rows.
"""
