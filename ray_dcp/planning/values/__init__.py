"""What a rank hands over: collected, named; what has no name of its own surveyed and pickled. See ``collect``."""
