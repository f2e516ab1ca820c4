"""Forward passes of one token at a time: a model's bodies, with what each op keeps of earlier positions."""
