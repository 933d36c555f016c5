"""The notebook's part: ``%%elastic_train``, ``%elastic`` and displays of jobs.

Importing this package loads neither IPython nor ipywidgets; loading the extension does.
"""
