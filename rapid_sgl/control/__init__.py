"""Draft only as far as it pays: what passes cost, which drafts are accepted, and what follows from both."""
