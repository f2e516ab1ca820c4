"""Generation of text from a trained model: prompts, samplers of tokens, and the text that they make."""
