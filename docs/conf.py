"""How Sphinx builds the documentation: `sphinx-build -n -W docs docs/_build`."""

import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

import django

# Autodoc imports the package, whose models need settings.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
django.setup()

project = "django-distlock"
author = "The django-distlock authors"
copyright = author  # noqa: A001 - the name that Sphinx reads
version = release = installed_version("django-distlock")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx_copybutton"]
exclude_patterns = ["_build", "_inventories"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Signatures are written out where they are documented: types of other projects are no links here.
autodoc_typehints = "none"
# The names that these pages refer to, in inventories of ours: the build needs no network. A name that they lack fails it.
intersphinx_mapping = {
    "django": ("https://docs.djangoproject.com/en/stable/", "_inventories/django.txt"),
    "python": ("https://docs.python.org/3/", "_inventories/python.txt"),
}
autodoc_member_order = "bysource"

# What is copied is what is typed: no prompts, and no output of the commands behind them.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"django-distlock {release}"
