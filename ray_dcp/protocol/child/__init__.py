"""The process that writes what a process alone has staged, as a node's agent does for ranks.

``process_link`` starts it and asks it, ``writer_process`` is what it does, ``commit_alone`` its commit of a save whose
process has died, ``child_messages`` what the two say to each other. It starts without torch and needs it for such a
commit alone: while the process lives, that commits by itself. Flow: ``docs/async_saves.md``.
"""
