"""What is committed under a root, and what to say of a place where nothing is. Reads no payloads."""
