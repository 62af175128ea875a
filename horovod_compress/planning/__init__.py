"""What ``hvd-compress plan`` does: reads a model, predicts its steps, shows them, and compares them with real ones."""
