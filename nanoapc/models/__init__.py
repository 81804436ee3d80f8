"""Models: from a directory's files (checkpoint, config, weights) to a decoder, one file per family."""
