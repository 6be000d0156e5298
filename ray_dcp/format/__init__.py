"""What is on disk, as bytes and rules: names of files, records, ``.metadata``, the manifest, safetensors headers.

``FORMAT.md``, in this folder, is the text. Nothing here opens a file, and nothing knows a store, a plan or a rank.
Begin with ``names`` (which files there are), ``zip_record`` (what a record is) and ``manifest`` (what is said of all).
"""
