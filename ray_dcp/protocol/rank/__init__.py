"""A rank's half of a save (``save``) and of a load (``load``): start with either, a page each.

``remote_call`` is its way to the coordinator, ``background`` the asynchronous saves of a process, ``user_staging`` what
a user's stager does in one. Not here: the coordinator's half, of which nothing is imported.
"""
