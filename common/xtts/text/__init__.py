"""Text to token ids: cleaning by each language's rules, numbers in words, the vocabulary, and
splitting.
"""
