"""SentencePiece: unigram, BPE and character models, trained from documents."""

from terakoya_plugins.tokenizers.sentencepiece.tokenizer import SentencePiece as SentencePiece
from terakoya_plugins.tokenizers.sentencepiece.tokenizer import register_tokenizers as register_tokenizers
