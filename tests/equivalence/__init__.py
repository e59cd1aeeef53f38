"""Whatever a training script does, N ranks under every scheme against one process on the union of their batches."""
