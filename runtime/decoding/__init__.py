"""Forward passes of one token at a time: a model's bodies, with KV caches and other states of ops."""
