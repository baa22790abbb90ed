"""What the transformers engine is made of: loading, buffers, attention, drawing."""
