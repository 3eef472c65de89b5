"""Files of unknown origin: code that opens, decodes, deletes and prints them safely.

A checkpoint, a log or a model directory can be a download.  :mod:`moc.files.safe_directory` opens and deletes its files
without leaving the directory, :mod:`moc.files.decode` converts their JSON to declared types, and
:mod:`moc.files.decode` makes their text safe to print (``docs/reference/security.md``).
"""
