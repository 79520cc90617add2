"""The keys under which store.json records shards, templates, words and unknown tokens."""

SHARD, SHARD_BLOCKS = "shard", "shard blocks"
"""Keys in the store of a shard: its number and the count, and where its first block begins and its last one ends."""

TEMPLATE_INPUT = "tokenizer chat template"
"""Key of the hash of the chat template among the inputs of a store of conversations."""

WORDS_INPUT = "words"
"""Key of the hash of the word finder among the inputs of a store, and of its settings among the options."""

UNKNOWN = "unknown tokens"
"""The note that counts the tokens of the text for which the tokenizer has no piece; absent where there is none."""
