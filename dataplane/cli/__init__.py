"""`tq`: run the service from a shell, look into a running one, change, save, restore and measure it.

A verb a file, assembled in `app`. What takes long to import is imported by the verb that needs it, when it runs.
"""

from dataplane.cli.app import main as main
