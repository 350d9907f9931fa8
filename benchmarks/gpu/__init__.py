"""The GPU path, looked at without a GPU: `python -m benchmarks.gpu`."""
