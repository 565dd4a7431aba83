"""Text to token ids: cleaning by the rules of each language, numbers in words, the vocabulary, and
splitting.
"""
