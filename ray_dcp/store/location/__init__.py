"""Where things are, as people write it: paths, URLs, keys. Text alone; nothing is looked up."""
