"""`make docs` builds the site into site/; a broken link or anchor fails it."""

from megaresume import __version__

project, author, release = "megaresume", "The megaresume developers", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["first-page.css"]
html_title = f"megaresume {release}"
myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "fieldlist"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["deepspeed", "megatron"]
napoleon_custom_sections = [("Raises on every rank", "Raises")]
