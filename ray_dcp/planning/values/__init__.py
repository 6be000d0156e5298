"""What a rank hands over: collected and named; values without a name are surveyed and pickled. See ``collect``."""
