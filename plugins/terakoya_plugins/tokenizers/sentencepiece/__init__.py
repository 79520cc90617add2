"""SentencePiece: unigram, BPE and characters, trained from documents."""

from terakoya_plugins.tokenizers.sentencepiece.tokenizer import SentencePiece as SentencePiece
from terakoya_plugins.tokenizers.sentencepiece.tokenizer import register_tokenizers as register_tokenizers
