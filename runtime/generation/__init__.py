"""Generation of text from a trained model: prompts, the choice of tokens, and the text that they make."""
