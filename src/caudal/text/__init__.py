"""Text on either side of the model: tokenizers, incremental detokenization, chat templates."""
