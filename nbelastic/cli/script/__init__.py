"""Scripts: from the words of a command to ``__main__`` in a rank."""
