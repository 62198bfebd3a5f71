"""Verification: the law (pure torch) and what SGLang requests ask of it."""
