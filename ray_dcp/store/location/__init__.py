"""Places as people write them: paths, URLs, keys. Text alone; no store is opened."""
