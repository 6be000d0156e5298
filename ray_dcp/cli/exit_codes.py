"""The end of each command's help."""

EXIT_CODES = """\
exit codes:
  0    done
  1    failed for a reason that has no code of its own
  2    wrong usage: an argument, or a URL whose scheme is not known
  3    not found: no checkpoint, folder or file is there
  4    the store failed, or refused access
  5    damaged, unsafe to read, or written in a newer format
  130  interrupted
"""
